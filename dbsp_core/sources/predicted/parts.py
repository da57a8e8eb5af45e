"""Choosing blocks a part at a time: what is held of scores does not grow with the square of the tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dbsp_kernels.prediction.block_selection import pairs_at_once, select_blocks

__all__ = ["select_in_parts"]


def select_in_parts(
    scores_of: Callable[[int, int], torch.Tensor],
    chance_of: Callable[[torch.Tensor], torch.Tensor],
    dense: torch.Tensor,
    nq: int,
    limits: tuple[float | None, int],
) -> torch.Tensor:
    """`select_blocks` of all heads, as many at once as are few pairs of blocks, and of larger heads some rows.

    scores_of: float64[heads, nq, nk] of the heads from the first to before the second;  chance_of: makes some rows'
               scores chances, each row on its own: so the parts cannot change a bit
    dense, limits: as for `select_blocks`
    """
    heads, nk = len(dense), dense.shape[1] - nq
    at_once = pairs_at_once(dense.is_cuda)
    together = max(1, at_once // (nq * nk))
    rows = nq if nq * nk <= at_once else max(1, at_once // nk)
    found = []
    for first in range(0, max(1, heads), together):
        scores, own = scores_of(first, first + together), dense[first : first + together]
        by_rows = [
            select_blocks(chance_of(some), _of_rows(own, nq, row, some.shape[1]), *limits)
            for row, some in zip(range(0, nq, rows), scores.split(rows, dim=1), strict=True)
        ]
        found.append(by_rows[0] if len(by_rows) == 1 else torch.cat(by_rows, dim=1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _of_rows(dense: torch.Tensor, nq: int, first: int, count: int) -> torch.Tensor:
    """bool[heads, count + nk]: of some rows, and of all columns."""
    if count == nq:
        return dense
    return torch.cat([dense[:, first : first + count], dense[:, nq:]], dim=1)
