"""Plans that send only selective KV exchange: what is needed, and rows cut in token order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.planning.chunks import Chunks
from dbsp_core.sources import MaskRequest, WindowSource
from tests.support.generators import SEEDS, examples, grids, random_bits

MASK = WindowSource(window=(3, 9, 15), block_q=32, block_k=32).mask(MaskRequest(0, 12, (9, 24, 40), layers=2))


@given(grid=grids(least_key_blocks=3), heads=st.integers(1, 4), seed=SEEDS, world=st.integers(1, 6))
@examples(30)
def test_needed_is_what_some_row_of_the_rank_attends_to(grid, heads, seed, world):
    mask = BlockMask(random_bits(heads, grid, seed), grid)
    owner = np.random.default_rng(seed).integers(world, size=(heads, grid.nq))
    needed = Chunks.of_rows(owner, np.zeros(grid.nk, dtype=np.int64), Strategy(1, world), mask).sent
    for rank in range(world):
        rows = torch.from_numpy(owner == rank)[..., None]
        assert (needed[rank] == (mask.bits & rows).any(dim=1).numpy()).all()


@pytest.mark.parametrize(
    ("keys", "layout_name"), [("needed", "contiguous"), ("all", "striped"), ("all", "contiguous")]
)
def test_chunks_bring_every_key_once_from_one_ring_rank_each(keys, layout_name):
    mask, strategy = MASK, Strategy(2, 4)
    layout = SequenceLayout.named(layout_name, mask.grid, strategy)
    plan = make_plan(mask, strategy, layout=layout, keys=keys)
    for rank in range(strategy.world):
        came = np.zeros_like(plan.chunks.sent[rank], dtype=int)
        for head, block in plan.chunks.blocks_for(rank):
            np.add.at(came, (head, block), 1)
        assert (came == plan.chunks.sent[rank]).all()
    traffic = traffic_of(plan, layout)
    by_ring_rank = traffic.keys.reshape(4, 4, 2, 4, 2).sum(axis=(2, 4))  # [chunk, from, to]
    for chunk in range(4):
        own = sum(by_ring_rank[chunk, (to - chunk) % 4, to] for to in range(4))
        assert own >= 0.9 * by_ring_rank[chunk].sum(), "but for blocks that are cut between ranks"


def test_plan_does_not_fit_a_mask_with_more_keys():
    mask, plan = MASK, make_plan(MASK, "U2R2", keys="needed")
    assert plan.fits(mask)
    fewer = mask.bits.clone()
    fewer[:, ::2] = False
    assert plan.fits(BlockMask(fewer, mask.grid))
    rank, head, block = (int(index[0]) for index in np.nonzero(~plan.chunks.sent))
    row = int(np.flatnonzero(plan.owner[head] == rank)[0])
    more = mask.bits.clone()
    more[head, row, block] = True
    assert not plan.fits(BlockMask(more, mask.grid))
    assert make_plan(mask, "U2R2").fits(BlockMask(more, mask.grid)), "which brings every key"


def test_plans_that_send_other_keys_differ():
    plan = make_plan(MASK, "U2R2", keys="needed")
    other = plan.chunks.sent.copy()
    other[0, 0, 0] ^= True
    for chunks in (
        Chunks.of_heads(plan.owner, plan.chunks.k_ring_rank, plan.strategy),
        replace(plan.chunks, sent=other),
    ):
        another = replace(plan, chunks=chunks)
        assert not plan.same_routes(another)
        assert not another.same_routes(plan)
        assert plan.fingerprint != another.fingerprint
    assert plan.same_routes(replace(plan, chunks=replace(plan.chunks, sent=plan.chunks.sent.copy())))
