"""Which runs of tokens are copied: the table that every implementation of `copy_segments` reads.

A run is a few tokens of one head that lie together on both sides: 24 bytes of table for up to a block of tokens, and
no index per token in device memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_kernels.packing.h2d import to_device

__all__ = ["COLUMNS", "CopySegments"]

COLUMNS = ("from_head", "from_token", "to_head", "to_token", "length", "zeros")


@dataclass(frozen=True, eq=False)
class CopySegments:
    """What `copy_segments` copies; no two runs write to one place.

    table: int32[n, 6], COLUMNS: so many tokens are copied, and so many zeros written behind them
    mean:  tokens and zeros of a run, on average
    """

    table: torch.Tensor
    mean: float

    @classmethod
    def of(cls, columns: np.ndarray, device: torch.device) -> CopySegments:
        """columns: int[n, 6] on the host; runs in which there is nothing to write are left out."""
        size = columns[:, 4] + columns[:, 5]
        kept = np.ascontiguousarray(columns if (size > 0).all() else columns[size > 0], dtype=np.int32)
        return cls(to_device(kept, device), float(size.sum()) / max(1, len(kept)))

    def to(self, device: torch.device) -> CopySegments:
        """The same on a device. The table is on the host."""
        return CopySegments(to_device(self.table.numpy(), device), self.mean)

    @cached_property
    def entries(self) -> list[list[int]]:
        """The table as Python's numbers."""
        entries: list[list[int]] = self.table.tolist()
        return entries

    @cached_property
    def places(self) -> tuple[torch.Tensor, ...]:
        """int64 each, by token: from_head, from_token, to_head, to_token; and to_head, to_token of the zeros."""
        table = self.table.long()
        from_head, from_token, to_head, to_token, length, zeros = table.unbind(1)
        copied = (_spread(from_head, length), _counted(from_token, length))
        written = (_spread(to_head, length), _counted(to_token, length))
        return (*copied, *written, _spread(to_head, zeros), _counted(to_token + length, zeros))


def _spread(values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(values, sizes)


def _counted(starts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """start, start + 1, … of every run, one after the other."""
    before = starts - (sizes.cumsum(0) - sizes)
    spread = torch.repeat_interleave(before, sizes)
    return spread + torch.arange(len(spread), device=spread.device)
