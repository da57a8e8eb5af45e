"""What a notebook or a debugger prints of db-SP's objects: one short line, which asks nothing of other ranks."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Rehoming,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
)
from dbsp_core.config import DbspConfig
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import plan_sequences
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import LocalQK, SpargeSource
from dbsp_core.sources.spec import mask_in_words, mask_settings
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


def test_a_plan(mask):
    plan = make_plan(mask, "U2R1")
    numbers = f"ρ_s {plan.rho_before:.3f} → {plan.rho:.3f}, bound {plan.rho_bound:.3f}"
    assert repr(plan) == f"<Plan U2R1 by dbsp: {numbers}, moved 0.0%>"
    bare = make_plan(mask, "U1R2", keys="needed", compare=False)
    assert repr(bare) == f"<Plan U1R2 by dbsp, needed keys: ρ_s {bare.rho:.3f}, moved {bare.moved:.1%}>"


def test_a_mask(mask):
    assert repr(mask) == "<BlockMask of 3 heads of 125 × 125 blocks, 2000 tokens, density 0.347>"
    packed = "<BlockMask of 3 heads of 250 × 250 blocks, 2 sequences packed, 4000 tokens, density 0.347>"
    assert repr(BlockMask.packed([mask, mask])) == packed
    assert repr(BlockMask(mask.bits.to("meta"), GRID)).endswith("2000 tokens, on meta>"), "it is not read back"


def test_a_layout_and_an_executor(mask):
    layout = SequenceLayout.contiguous(2000, 1)
    assert repr(layout) == "<SequenceLayout of 2000 tokens on 1 rank of 2000 places>"
    assert repr(SequenceLayout.contiguous(2000, 3)) == "<SequenceLayout of 2000 tokens on 3 ranks of 667 places>"
    plan = make_plan(mask, "U1R1")
    attend = DualBalancedAttention.prepare(plan, mask, layout, None, kernel="reference")
    assert repr(attend) == f"<DualBalancedAttention on rank 0 of 1, kernel reference, {plan}>"


def test_a_session_before_and_after_its_calls(session):
    start = "<db-SP session: 4 layers of 3 heads, strategy U2R1 on 2 ranks, sparge:"
    assert repr(session) == f"{start}block_q=16,block_k=16,cdf=0.92; 0 calls, 0 plans>"
    session._statistics.calls, session._statistics.plans = 96, 1
    session._statistics.counted, session._statistics.rho_sum = 2, 2.048
    with mock.patch.object(AttentionSession, "flush", side_effect=AssertionError("it waits")):
        assert repr(session) == f"{start}block_q=16,block_k=16,cdf=0.92; 96 calls, 1 plan, ρ_s 1.024>"


@pytest.mark.parametrize("text", ["sparge:cdf=0.92", "dense", "window:window=[1, 3, 3],block_q=32", "radial"])
def test_a_mask_source_is_written_as_it_is_read(text):
    source = DbspConfig.load({"mask": mask_settings(text)}).mask
    words = mask_in_words(source)
    assert sorted(words.partition(":")[2].split(",")) == sorted(text.partition(":")[2].split(","))
    assert DbspConfig.load({"mask": mask_settings(words)}).mask == source


def test_a_source_that_db_sp_does_not_know_is_named_by_its_class():
    class Mine(SpargeSource):
        pass

    assert mask_in_words(Mine(cdf=0.5)) == "Mine:cdf=0.5"


def test_what_holds_tensors_prints_none(mask, session):
    big, layout = torch.zeros(1, 3, 2000, 16), SequenceLayout.contiguous(2000, 1)
    plan = make_plan(mask, "U1R1")
    sample = PackedSample(torch.zeros(4, 3, 20, 30), 0.5, torch.zeros(77, 32))
    numbers = torch.ones(50).long().numpy()
    attend = DualBalancedAttention.prepare(plan, mask, layout, None)
    for one in (
        *(mask, mask.counts, GRID.q_axis, layout, plan, session),
        *(attend, attend.prepared, attend.prepared.tables, attend.prepared.route),
        *(LocalQK.alone(big, big), Rehoming.of(layout, layout)),
        *(sample, sample.condition, LocalPredictions([big] * 9, big.sum(), None, None)),
        plan_sequences(numbers, numbers, numbers * 0, BagTopology.parse("g1n2", 2)),
    ):
        text = repr(one)
        assert len(text) <= 2 * MOST, text
        assert "\n" not in text
        assert "tensor(" not in text
        assert "array(" not in text
