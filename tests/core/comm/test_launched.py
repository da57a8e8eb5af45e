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


def test_group_of_one_process_is_accepted(launched):
    assert attention(group=ALONE).shape == (1, 1, 4, 8)


@pytest.mark.parametrize(
    ("name", "value"),
    [("WORLD_SIZE", "1"), ("WORLD_SIZE", "many"), ("WORLD_SIZE", "9" * 5000), ("RANK", None)],
    ids=lambda value: str(value)[:10],
)
def test_variables_without_ranks_are_ignored(launched, monkeypatch, name, value):
    monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv(name, value)
    assert SequenceGroup.from_group() == ALONE
