"""Copies of token segments, int8 rows, and tables to the device: what exchanges pack and unpack by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_kernels.rounding import LARGEST, TINY


def to_device(array: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns the array on the device, itself where it is there; from the host to a GPU by pinned memory.

    So the CPU need not wait for what the device is doing.
    """
    tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def row_words(head_dim: int) -> int:
    """Words of a token of so many numbers, its scale included."""
    return -(-head_dim // 4) + 1


def quantise_segments(
    source: torch.Tensor, destination: torch.Tensor, segments: CopySegments, less: torch.Tensor | None = None
) -> None:
    """Copies segments from tokens to rows of int8: number / scale, to the nearest, halves to even.

    A token's scale is its largest magnitude / 127. One with a number that is not finite gets scale NaN.

    Args:
        source: [B, heads, tokens, D], floating-point, any strides.
        destination: int32[B, heads, tokens, row_words(D)]; views with words side by side are welcome. A buffer
            [tokens, B, row_words(D)] is one head.
        segments: Without zeros.
        less: float32[B, source's heads, D], what is subtracted from every token beforehand. None: nothing.
    """
    destination = as_heads(destination)
    if source.is_cuda:
        from dbsp_kernels.triton.exchange import triton_quantise_segments  # here: triton need not be installed

        triton_quantise_segments(source, destination, segments.table, segments.mean, less)
        return
    from_head, from_token, to_head, to_token, *_ = segments.positions
    values = source[:, from_head, from_token].to(torch.float32)
    if less is not None:
        values -= less[:, from_head]
    destination[:, to_head, to_token] = rows_of_tokens(values)


def rows_of_tokens(tokens: torch.Tensor) -> torch.Tensor:
    """Quantizes float32[..., D] to int32[..., row_words(D)], by torch's own operations."""
    head_dim, largest = tokens.shape[-1], tokens.abs().amax(dim=-1)  # NaN where one is
    scale = largest / LARGEST
    scale = torch.where(largest.isfinite(), scale, torch.nan).masked_fill_(largest < TINY, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    rows = tokens.new_zeros(*tokens.shape[:-1], row_words(head_dim), dtype=torch.int32)
    rows.view(torch.int8)[..., :head_dim] = (tokens / divisor[..., None]).round_().nan_to_num_(0.0)
    rows.view(torch.float32)[..., -1] = scale
    return rows


def restore_rows(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens [..., D] of a floating-point dtype from contiguous rows int32[..., row_words(D)]: number · scale."""
    tokens = rows.new_empty(*rows.shape[:-1], head_dim, dtype=dtype)
    return torch.mul(rows.view(torch.int8)[..., :head_dim], rows.view(torch.float32)[..., -1:], out=tokens)


@dataclass(frozen=True, eq=False)
class CopySegments:
    """Segments for `copy_segments`; no two of them write to one slot.

    Attributes:
        table: int32[n, 6], from_head, from_token, to_head, to_token, length and zeros of each: `length` tokens are
            copied, and `zeros` zeros written behind them.
        mean: Tokens and zeros of a segment, on average.
    """

    table: torch.Tensor
    mean: float

    @classmethod
    def from_columns(cls, columns: np.ndarray, device: torch.device) -> CopySegments:
        """Makes the table of columns int[n, 6] on the host; leaves out segments in which nothing is to be written."""
        size = columns[:, 4] + columns[:, 5]
        kept = np.ascontiguousarray(columns if (size > 0).all() else columns[size > 0], dtype=np.int32)
        return cls(to_device(kept, device), float(size.sum()) / max(1, len(kept)))

    def to(self, device: torch.device) -> CopySegments:
        """Copies a table on the host to a device."""
        return CopySegments(to_device(self.table, device), self.mean)

    @cached_property
    def count(self) -> int:
        """Number of segments."""
        return self.table.shape[0]

    @cached_property
    def positions(self) -> tuple[torch.Tensor, ...]:
        """int64 each, by token: from_head, from_token, to_head, to_token; and to_head, to_token of the zeros."""
        table = self.table.long()
        from_head, from_token, to_head, to_token, length, zeros = table.unbind(1)
        spread = torch.repeat_interleave
        copied = (spread(from_head, length), _counted(from_token, length))
        written = (spread(to_head, length), _counted(to_token, length))
        return (*copied, *written, spread(to_head, zeros), _counted(to_token + length, zeros))


def copy_segments(
    sources: Sequence[torch.Tensor], destination: torch.Tensor, segments: Sequence[CopySegments], *, add: bool = False
) -> None:
    """Copies segments of up to three sources, such as q, k and v: on a GPU in one pass, and in one launch.

    Nothing else in the destination is touched.

    Args:
        sources, destination: [B, heads, tokens, D] of one B, D, dtype and device, of any strides; views are welcome.
            Buffers of exchanges, [tokens, B, D], are one head.
        segments: Segments of each source; no two segments of all write to one slot.
        add: True if tokens are added to the destination; such segments have no zeros.
    """
    if destination.is_cuda:
        from dbsp_kernels.triton.exchange import triton_copy_segments  # here: triton need not be installed

        triton_copy_segments(sources, destination, segments, add)
        return
    destination = as_heads(destination)
    for source, of_source in zip(map(as_heads, sources), segments, strict=True):
        from_head, from_token, to_head, to_token, zero_head, zero_token = of_source.positions
        if add:
            destination[:, to_head, to_token] += source[:, from_head, from_token]
            continue
        destination[:, to_head, to_token] = source[:, from_head, from_token]
        destination[:, zero_head, zero_token] = 0


def copy_to_both(source: torch.Tensor, destinations: Sequence[torch.Tensor], segments: Sequence[CopySegments]) -> None:
    """Copies segments of one source to two destinations, such as q to one and k and v to another, as `copy_segments`.

    `segments` has those of each destination.
    """
    if source.is_cuda:
        from dbsp_kernels.triton.exchange import triton_copy_to_both  # here: triton need not be installed

        triton_copy_to_both(source, destinations, segments)
        return
    for destination, of_destination in zip(destinations, segments, strict=True):
        copy_segments([source], destination, [of_destination])


def as_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [B, heads, tokens, D] itself, and a buffer [tokens, B, D] as one head of it."""
    return tensor.transpose(0, 1).unsqueeze(1) if tensor.ndim == 3 else tensor


def _counted(starts: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Returns start, start + 1, … of every segment, one after the other."""
    before = starts - (sizes.cumsum(0) - sizes)
    spread = torch.repeat_interleave(before, sizes)
    return spread + torch.arange(len(spread), device=spread.device)
