"""Two rows that share the tiles which both need: their lists as one, and where in it each row's own blocks are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["PairedRows", "pair_rows"]

_SHORT, _NONE = 1 << 30, (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class PairedRows:
    """Rows in pairs, with the blocks that each pair and each of its rows needs.

    Attributes:
        rows: int32[P, 2]; where their number is odd, the last row is a pair with itself.
        list: int32[P, 2 · width], the blocks that one or both rows need, each once, full ones first.
        tiles: int32[P], number of entries in the list.
        turn: int32[P, 2, width], places in the list of each row's own blocks, in its order.
    """

    rows: torch.Tensor
    list: torch.Tensor
    tiles: torch.Tensor
    turn: torch.Tensor


def pair_rows(
    kv_index: torch.Tensor, kv_count: torch.Tensor, kv_full: torch.Tensor, row_schedule: torch.Tensor
) -> PairedRows:
    """Pairs rows that start one after the other: of like length, and, within a head, with many blocks in common.

    The arguments are those of `dbsp_kernels.block_attention`, for fewer than 2^28 blocks. A fixed number of operators.
    """
    # 1. Pairs.
    rows = torch.cat([row_schedule, row_schedule[-1:]])[: 2 * -(-len(row_schedule) // 2)].view(-1, 2)
    picked, width = rows.long(), kv_index.shape[1]
    # 2. Keys that sort by short or full, then by block; of a block that both need, the first row's precedes.
    column = torch.arange(width, device=kv_index.device)
    whose = torch.tensor([1, 2], dtype=torch.int32, device=kv_index.device)[:, None]
    keys = kv_index[picked] * 4 + whose + torch.where(column < kv_full[picked][..., None], 0, _SHORT)
    keys = keys.masked_fill(column >= kv_count[picked][..., None], _NONE).flatten(1).sort(dim=1).values
    # 3. Entries of the shared list: where a block differs from the one before.
    there = keys != _NONE
    new = there.clone()
    new[:, 1:] &= keys[:, 1:] >> 2 != keys[:, :-1] >> 2
    place = new.cumsum(1) - 1
    block = torch.where(new, (keys & ~_SHORT) >> 2, 0).int()
    shared = torch.zeros_like(block).scatter_add_(1, place.clamp(min=0), block)
    # 4. The rows' own entries, in the same order.
    own = there[:, None] & (keys[:, None] & 3 == whose)  # bool[P, 2, 2 · width]
    rank = torch.where(own, own.cumsum(2) - 1, width)
    turn = torch.zeros(len(rows), 2, width + 1, dtype=torch.int32, device=kv_index.device)
    turn.scatter_(2, rank, place.int()[:, None].expand(-1, 2, -1))
    return PairedRows(rows.contiguous(), shared, new.sum(1, dtype=torch.int32), turn[..., :width].contiguous())
