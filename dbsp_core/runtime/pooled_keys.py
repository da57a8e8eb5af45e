"""Pooled keys of skipped blocks on one rank: brought to the owners of rows, and attended to before the first period.

They are means of keys and values at home, pooled as predicted masks pool queries and keys, and travel in an exchange
of their own: of the heads of which a rank has rows, one key and value a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.all_to_all import KeysAtHome
from dbsp_core.comm.block_pooling import ShardedBlocks, pool_heads
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.assignment import Assignment
from dbsp_core.runtime.kernel_tables import TableLayout
from dbsp_kernels import PartialAttention, attend_pooled
from dbsp_kernels.packing.h2d import to_device

__all__ = ["Pooled", "PooledKeysOfMask", "PooledLayout"]


class Pooled(NamedTuple):
    """Mean keys and values of every block, float32[Hs, B, nk, D], of the heads of which a rank has rows."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class PooledLayout:
    """What pooled keys under one assignment have in common on one rank, whatever the mask.

    Attributes:
        heads_of: By rank, int64, the heads of which it has rows.
        blocks: The distribution of key blocks over ranks.
        spans: For the rows of each sequence of each of the rank's heads: the head's place among `heads_of`, and first
            and last rows and key blocks, exclusive.
        log_tokens: float32[nk], ln of each block's tokens.
    """

    heads_of: tuple[np.ndarray, ...]
    blocks: ShardedBlocks
    spans: tuple[tuple[int, slice, slice], ...]
    log_tokens: torch.Tensor

    @classmethod
    def of(cls, assignment: Assignment, layout: SequenceLayout, rank: int, device: torch.device) -> PooledLayout:
        grid = assignment.grid
        blocks = ShardedBlocks.of(layout, grid, "kv")
        heads_of = tuple(np.unique(assignment.rows_of(one)[0]) for one in range(layout.world))
        log_tokens = to_device(np.log(grid.k_axis.lengths).astype(np.float32), device)
        return cls(heads_of, blocks, _spans(grid, heads_of[rank], *assignment.rows_of(rank)), log_tokens)

    def gather(self, keys: KeysAtHome, group: SequenceGroup) -> Pooled:
        """Pools the keys and values of all ranks, less the mean that keys travel less. Collective."""
        means = pool_heads((keys.k, keys.v), self.blocks, self.heads_of, group)[..., :-1]
        own_keys, own_values = means.chunk(2, dim=2)
        if keys.mean is not None:
            heads = to_device(self.heads_of[group.rank], keys.mean.device)
            own_keys = own_keys - keys.mean.index_select(1, heads).transpose(0, 1)[:, :, None]
        return Pooled(own_keys, own_values)


class PooledKeysOfMask:
    """The pooled keys that one rank's rows attend to under one mask.

    Args:
        layout: Of the mask's assignment.
        tables: The same rank's, on the device of the calls to come.
        mask: Of the assignment's grid.
    """

    def __init__(self, layout: PooledLayout, tables: TableLayout, mask: BlockMask) -> None:
        self._layout = layout
        bits, places = mask.row_bits.to(tables.rows.device, non_blocking=True), tables.rows
        self._skipped = []
        for _, rows, blocks in layout.spans:
            own = places[rows]
            if mask.grid.packed_from:
                columns = torch.arange(blocks.stop - blocks.start, device=own.device)
                self._skipped.append(~bits[own[:, None] + columns])
            else:
                self._skipped.append(~bits.index_select(0, own))

    def gather(self, keys: KeysAtHome, group: SequenceGroup) -> Pooled:
        """What they are in one call. Collective."""
        return self._layout.gather(keys, group)

    def attend(self, rows: torch.Tensor, pooled: Pooled, scale: float) -> PartialAttention:
        """Attention of packed rows [B·Rq, Bq, D] to them, to be merged with that to keys.

        Returns:
            out [B·Rq, Bq, D] and lse [B·Rq, Bq], both contiguous and in at least 32 bits.
        """
        batch = pooled.keys.shape[1]
        by_item = rows.unflatten(0, (batch, -1))
        wide = torch.promote_types(rows.dtype, torch.float32)
        out, lse = torch.zeros_like(by_item, dtype=wide), by_item.new_full(by_item.shape[:3], -torch.inf, dtype=wide)
        for (head, some, blocks), skipped in zip(self._layout.spans, self._skipped, strict=True):
            bias = torch.where(skipped, self._layout.log_tokens[blocks], -torch.inf)
            keys, values = pooled.keys[head, :, blocks], pooled.values[head, :, blocks]
            out[:, some], lse[:, some] = attend_pooled(by_item[:, some], keys, values, bias, scale)
        return out.flatten(0, 1), lse.flatten(0, 1)


def _spans(
    grid: BlockGrid, heads: np.ndarray, head: np.ndarray, block: np.ndarray
) -> tuple[tuple[int, slice, slice], ...]:
    """See `PooledLayout.spans`, from the rank's heads, and the head and query block of each of its rows."""
    sequence, bounds = grid.q_axis.sequence_of[block], grid.k_axis.bounds
    changes = np.flatnonzero(np.diff(head, prepend=-1) | np.diff(sequence, prepend=-1))
    ends = np.append(changes, len(head))[1:]
    return tuple(
        (int(np.searchsorted(heads, head[a])), slice(int(a), int(b)), slice(*map(int, bounds[sequence[a] :][:2])))
        for a, b in zip(changes, ends, strict=True)
    )
