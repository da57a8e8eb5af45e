"""Tables of token segments, and copying them to the device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies the array to the device if it is not there, through pinned memory so that the CPU does not wait."""
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class CopySegments:
    """Segments for `copy_segments`, which write to disjoint slots.

    The table's columns are from_head, from_token, to_head, to_token, length and zeros: `length` tokens are copied,
    followed by `zeros` zero tokens.
    """

    table: torch.Tensor  # int32[n, 6]
    mean: float  # number of tokens and zeros per segment

    @classmethod
    def from_columns(cls, columns: np.ndarray, device: torch.device) -> CopySegments:
        """Makes the table from rows int[n, 6] on the host, without empty segments."""
        size = columns[:, 4] + columns[:, 5]
        kept = np.ascontiguousarray(columns if (size > 0).all() else columns[size > 0], dtype=np.int32)
        return cls(to_device(kept, device), float(size.sum()) / max(1, len(kept)))

    def to(self, device: torch.device) -> CopySegments:
        return CopySegments(to_device(self.table, device), self.mean)

    @cached_property
    def count(self) -> int:
        return self.table.shape[0]

    @cached_property
    def positions(self) -> tuple[torch.Tensor, ...]:
        """Per-token int64 indices: from_head, from_token, to_head, to_token; then to_head, to_token of the zeros."""
        table = self.table.long()
        from_head, from_token, to_head, to_token, length, zeros = table.unbind(1)
        spread = torch.repeat_interleave
        copied = (spread(from_head, length), _counted(from_token, length))
        written = (spread(to_head, length), _counted(to_token, length))
        return (*copied, *written, spread(to_head, zeros), _counted(to_token + length, zeros))


def _counted(starts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns start, start + 1, … of every segment, concatenated."""
    before = starts - (sizes.cumsum(0) - sizes)
    spread = torch.repeat_interleave(before, sizes)
    return spread + torch.arange(len(spread), device=spread.device)
