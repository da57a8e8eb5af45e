"""Processes that torchrun has started, and that did not meet: each would do all of the work by itself, unnoticed."""

from __future__ import annotations

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, dual_balanced_attention
from dbsp_core.utils.errors import UserError

ALONE = SequenceGroup(0, 1)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")


def attention(**options: object) -> torch.Tensor:
    mask = BlockMask(torch.ones(1, 1, 1, dtype=torch.bool), BlockGrid.uniform(tokens=4, block=4))
    q = torch.ones(1, 1, 4, 8)
    return dual_balanced_attention(q, q, q, mask, "U1R1", **options)


def test_default_group_without_init_process_group_raises(launched):
    for start in (SequenceGroup.from_group, attention):
        with pytest.raises(UserError, match=r"^torchrun started 8 processes, .* torch.distributed.init_process_group"):
            start()
    assert attention(group=ALONE).shape == (1, 1, 4, 8)


def test_variables_without_ranks_are_ignored(launched, monkeypatch):
    for size in ("1", "many", "9" * 5000):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert SequenceGroup.from_group() == ALONE
    monkeypatch.delenv("RANK")
    assert SequenceGroup.from_group() == ALONE
