"""Representations of db-SP objects in a notebook or a debugger: one short line, which asks nothing of other ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Redistribution,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
)
from dbsp_core.config import DbspConfig
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import plan_sequences
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK
from dbsp_diffusers import LocalPredictions, PackedSample

GRID = BlockGrid.uniform(2000, 16)
MOST = 200


@pytest.fixture(scope="module")
def mask() -> BlockMask:
    bits = torch.zeros(3, GRID.nq, GRID.nk, dtype=torch.bool)
    bits[0] = True
    bits[1, :, :5] = True
    return BlockMask(bits, GRID)


@pytest.fixture
def session() -> AttentionSession:
    config = DbspConfig.load({"mask": {"source": "sparge", "cdf": 0.92, "block_q": 16, "block_k": 16}})
    return AttentionSession(config, SequenceGroup(1, 2), Strategy(2, 1), heads=3, layers=4)


def test_objects_with_tensors_are_printed_in_one_line(mask, session):
    big, layout = torch.zeros(1, 3, 2000, 16), SequenceLayout.contiguous(2000, 1)
    plan = make_plan(mask, "U1R1")
    sample = PackedSample(torch.zeros(4, 3, 20, 30), 0.5, torch.zeros(77, 32))
    numbers = torch.ones(50).long().numpy()
    attend = DualBalancedAttention.prepare(plan, mask, layout, None)
    for one in (
        *(mask, mask.counts, GRID.q_axis, layout, plan, session),
        *(attend, attend.prepared, attend.prepared.tables, attend.prepared.route),
        *(LocalQK.alone(big, big), Redistribution.between(layout, layout)),
        *(sample, sample.condition, LocalPredictions([big] * 9, big.sum(), None, None)),
        plan_sequences(numbers, numbers, numbers * 0, BagTopology.parse("g1n2", 2)),
    ):
        with mock.patch.object(AttentionSession, "flush", side_effect=AssertionError("it waits")):
            text = repr(one)
        assert len(text) <= 2 * MOST, text
        assert "\n" not in text
        assert "tensor(" not in text
        assert "array(" not in text
