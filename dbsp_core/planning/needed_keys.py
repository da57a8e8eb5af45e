"""Which keys each rank's rows need."""

from __future__ import annotations

import numpy as np

from dbsp_core.masks.block_mask import BlockMask

__all__ = ["needed_keys"]


def needed_keys(mask: BlockMask, q_owner: np.ndarray, world: int) -> np.ndarray:
    """The (head, KV block) pairs that some row of each rank attends to.

    Args:
        mask: Its bits are read on the host.
        q_owner: int64[H, nq], the rank of each row.
        world: Number of ranks.

    Returns:
        bool[world, H, nk].
    """
    return mask.counts.columns_by_rank(q_owner, world) > 0
