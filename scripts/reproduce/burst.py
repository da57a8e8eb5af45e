"""BurstEngine's block-sparse balancing, from a mask's counts alone: every block is cut evenly over the ring.

Part p of all query blocks in order is ring rank p mod y's, and of all KV blocks slot p mod y's; heads are in equal
runs. No plan is made: the kernel would work on tiles of block / y, on a mask y² times as large.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dbsp_core import BlockMask, SequenceLayout, Strategy
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.planning.baselines import contiguous_heads
from dbsp_core.planning.bounds import whole_block_bound
from dbsp_core.planning.imbalance import imbalance_ratio, work_by_ring_step
from dbsp_core.planning.majority import baseline_assignment
from dbsp_core.utils.errors import UserError


@dataclass(frozen=True)
class BurstBalance:
    """The numbers that a plan would have; see `dbsp_core.planning.plan.Plan`."""

    rho: float
    rho_before: float
    rho_bound: float
    moved: float


def burst_balance(mask: BlockMask, strategy: Strategy, layout: SequenceLayout) -> BurstBalance:
    """Raises UserError for blocks that cannot be cut evenly over the ring."""
    grid, (x, y) = mask.grid, (strategy.ulysses, strategy.ring)
    if grid.block_q % y or grid.block_k % y:
        raise UserError(
            f"BurstEngine cuts every block over {y} ring ranks, but blocks of {grid.block_q}×{grid.block_k} cannot be "
            "cut so evenly; use another block size or strategy"
        )
    fine = replace(grid, block_q=grid.block_q // y, block_k=grid.block_k // y)
    q, k = _parts(grid.q_axis, fine.q_axis, y), _parts(grid.k_axis, fine.k_axis, y)
    by_rank, rows, columns = np.zeros((y, x, y)), [], []
    for bits, ulysses_rank in zip(mask.bits.cpu().numpy(), contiguous_heads(mask.heads, x), strict=True):
        dense = bits.astype(np.float64)
        by_rank[:, ulysses_rank] += q.T @ dense @ k
        rows.append((dense @ k.sum(axis=1))[grid.q_axis.block_of[fine.q_axis.starts]])
        columns.append((q.sum(axis=1) @ dense)[grid.k_axis.block_of[fine.k_axis.starts]])
    work = work_by_ring_step(by_rank.reshape(strategy.world, y).astype(np.int64), x)
    counts = (np.array(one).astype(np.int64) for one in (rows, columns))
    home = layout.rank // x
    stays = (fine.q_axis.block_of % y == home).mean() + 2 * (fine.k_axis.block_of % y == home).mean()
    before = baseline_assignment(grid, mask.heads, strategy).work(mask.counts)
    return BurstBalance(
        rho=imbalance_ratio(work),
        rho_before=imbalance_ratio(before),
        rho_bound=whole_block_bound(*counts, x, y),
        moved=float(1 - stays / 3),
    )


def _parts(blocks: BlockAxis, parts: BlockAxis, ring: int) -> np.ndarray:
    """int64[n, y]: how many parts of each block are each ring rank's."""
    found = np.zeros((len(blocks), ring), dtype=np.int64)
    np.add.at(found, (blocks.block_of[parts.starts], np.arange(len(parts)) % ring), 1)
    return found
