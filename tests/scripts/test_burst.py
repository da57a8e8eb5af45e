"""BurstEngine's balancing, counted: what a kernel would do on a mask whose blocks are cut over the ring."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.planning.imbalance import imbalance_ratio
from scripts.reproduce.burst import burst_balance
from tests.support.generators import random_bits


@pytest.mark.parametrize("name", ["U4R1", "U2R2", "U2R3", "U1R8"])
def test_every_part_of_a_block_is_counted_where_it_is(name):
    """Short blocks at the ends of text and video, which have fewer parts."""
    grid, strategy = BlockGrid(331, 37, 24, 48), Strategy.parse(name)
    mask = BlockMask(random_bits(5, grid, seed=2), grid)
    layout = SequenceLayout.striped(grid, strategy)
    x, y = strategy.ulysses, strategy.ring
    fine = replace(grid, block_q=24 // y, block_k=48 // y)
    work = np.zeros((y, strategy.world), dtype=np.int64)
    for i, row in enumerate(grid.q_axis.block_of[fine.q_axis.starts]):
        for j, column in enumerate(grid.k_axis.block_of[fine.k_axis.starts]):
            for head in np.flatnonzero(mask.bits[:, row, column]):
                work[(j - i) % y, i % y * x + head * x // 5] += 1
    found = burst_balance(mask, strategy, layout)
    assert found.rho == pytest.approx(imbalance_ratio(work))
    assert found.rho >= found.rho_bound >= 1
    assert found.rho_before == make_plan(mask, strategy, "contiguous").rho
    home = layout.rank // x
    moved = [fine.q_axis.block_of % y != home, *[fine.k_axis.block_of % y != home] * 2]
    assert found.moved == pytest.approx(np.mean(moved))


def test_blocks_that_cannot_be_cut():
    grid, strategy = BlockGrid.uniform(64, 16), Strategy(1, 3)
    with pytest.raises(ValueError, match="every block over 3 ring ranks, but blocks of 16×16 cannot"):
        burst_balance(BlockMask.dense(2, grid), strategy, SequenceLayout.contiguous(64, 3))
