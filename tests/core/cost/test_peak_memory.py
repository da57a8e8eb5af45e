"""The closed form of an attention's peak memory: equal to the counted one, and what follows from a limit on it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.cost.peak_memory import chunks_for, peak_bytes
from generators import random_bits
from peak_memory import peak_of_attention

D = 16


def a_mask(heads: int, tokens: int = 1030) -> BlockMask:
    """Heads of very different densities, a short last block."""
    grid = BlockGrid.uniform(tokens, 16)
    bits = random_bits(heads, grid, seed=heads)
    bits[1::2, :, ::3] = False
    return BlockMask(bits, grid)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [40, 12, 5])
def test_every_ranks_peak_is_the_counted_one(heads, dtype, gradients):
    mask = a_mask(heads)
    for strategy in (*Strategy.all_for(8), Strategy(3, 2), Strategy(1, 1)):
        layout = SequenceLayout.striped(mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout)
        shape = AttentionShape(1, heads, mask.grid.tokens, D, dtype.itemsize)
        unit = heads * layout.shard * D * dtype.itemsize
        counted = [
            peak_of_attention(plan, mask, layout, rank, D, dtype, gradients=gradients)
            for rank in range(strategy.world)
        ]
        formula = peak_bytes(plan.assignment, shape, layout, gradients=gradients)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)
