"""Pooled keys of skipped blocks: every UxRy and every way for keys to travel against a dense softmax over both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, dual_balanced_attention
from dbsp_core.masks.remainder import PooledKeys
from dbsp_core.utils.errors import UserError
from tests.support.attention_cases import Case, Inputs, attend, reference, run_case, whole
from tests.support.oracle import largest_difference

TOLERANCE = 1e-5
WORLDS = (1, 2, 3, 4)
SHAPES = (
    Case("-", pooled=True),
    Case("-", heads=5, tokens=331, text_tokens=21, block_k=32, batch=2, density=0.15, pooled=True),
    Case("-", heads=2, tokens=6 * 6 * 9, thw=(6, 6, 9), orders=("tile:2x4x4",), block_q=32, density=0.1, pooled=True),
    Case("-", tokens=7 + 5 * 7 * 9, text_tokens=7, thw=(5, 7, 9), orders=("tile:2x4x4",), whole_tiles=True,
         block_q=32, block_k=32, density=0.3, pooled=True),
)  # fmt: skip
WAYS = ({}, {"keys": "needed"}, {"keys": "all", "chunk_shares": (2, 1)}, {"precision": "int8"})


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_equals_dense_attention(threads, world, strategy):
    for seed, shape in enumerate(SHAPES):
        way = WAYS[(seed + world) % len(WAYS)] if strategy.ring > 1 else WAYS[(0, 3)[seed % 2]]
        planner, layout = ("dbsp", "contiguous", "random")[seed % 3], ("striped", "contiguous")[seed % 2]
        case = replace(shape, strategy=str(strategy), planner=planner, layout=layout, padded=True, seed=seed, **way)
        errors = threads(world).run(run_case, case)
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("sabotage", ["pooled keys left out", "pooled keys count once"])
def test_negative_controls_fail(threads, sabotage):
    case = Case("U2R2", pooled=True, sabotage=sabotage)
    assert max(threads(4).run(run_case, case)) > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions(threads, dtype):
    """Means are rounded to float32, whatever the model's precision."""
    case = Case("U1R3", pooled=True, dtype=dtype)
    limit = 1e-6 if dtype == torch.float64 else 2e-2
    assert max(threads(3).run(run_case, case)) <= limit


def test_some_rows_at_a_time_it_is_the_same(threads, monkeypatch):
    monkeypatch.setattr("dbsp_kernels.pooled.AT_ONCE", 1000)
    assert max(threads(2).run(run_case, Case("U1R2", pooled=True, batch=2))) <= TOLERANCE


def test_a_mask_that_has_them_is_another_mask():
    grid = BlockGrid.uniform(100, 16)
    bits = torch.zeros(2, grid.nq, grid.nk, dtype=torch.bool)
    assert BlockMask(bits, grid).fingerprint != BlockMask(bits, grid, PooledKeys()).fingerprint


def test_several_token_orders_are_refused():
    grid = BlockGrid(3 * 4 * 5, 0, 16, 16, (3, 4, 5), ("thw", "hwt"))
    with pytest.raises(UserError, match="give all heads one order"):
        BlockMask(np.ones((2, grid.nq, grid.nk), dtype=bool), grid, PooledKeys())


def gradients_refused(rank: int, world: int) -> bool:
    case = Case("U1R2", pooled=True)
    given = Inputs.of(case, rank)
    with pytest.raises(UserError, match="gradients do not flow through what a mask adds"):
        attend(case, given.mask, given.layout, [tensor.requires_grad_() for tensor in given.local])
    return True


def test_gradients_are_refused_on_all_ranks(threads):
    assert threads(2).run(gradients_refused) == [True, True]


def packed(rank: int, world: int, strategy: str) -> float:
    """Two sequences of which neither sees the other's pooled keys: the error against each by itself."""
    cases = [Case("-", tokens=95, text_tokens=9, pooled=True), Case("-", tokens=60, pooled=True, seed=1)]
    (one, first), (other, second) = (whole(case.attention) for case in cases)
    mask = BlockMask.packed([one, other])
    full = [torch.cat(both, dim=2) for both in zip(first, second, strict=True)]
    layout = SequenceLayout.contiguous(mask.grid.tokens, world)
    mine, places = (torch.from_numpy(a) for a in layout.tokens_at(rank))
    local = [t.new_zeros(*t.shape[:2], layout.shard, t.shape[3]).index_copy_(2, places, t[:, :, mine]) for t in full]
    out = dual_balanced_attention(*local, mask, strategy, layout=layout)
    expected = torch.cat([reference(case.attention) for case in cases], dim=2)
    return largest_difference(out[:, :, places], expected[:, :, mine])


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (3, "U1R3"), (4, "U2R2")])
def test_packed_sequences_see_their_own(threads, world, strategy):
    assert max(threads(world).run(packed, strategy)) <= TOLERANCE


def test_masks_with_and_without_are_not_packed():
    with_them, without = (whole(Case("-", tokens=40, pooled=pooled).attention)[0] for pooled in (True, False))
    with pytest.raises(UserError, match="need the same remainder"):
        BlockMask.packed([with_them, without])
