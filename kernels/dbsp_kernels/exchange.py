"""Copies of token segments, and int8 rows: what exchanges pack and unpack by."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbsp_kernels.rounding import LARGEST, TINY, norm_of, stages_of
from dbsp_kernels.segments import CopySegments


def row_words(head_dim: int) -> int:
    """Words of a token of so many numbers, its scale included."""
    return -(-head_dim // 4) + 1


def signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """Returns ±1.0 for each channel, float32[D], which rotation multiplies by before `butterflies`.

    Otherwise a part that is common to all channels would end up in one. These signs are a bent function: they spread
    that part, and each other pattern that `butterflies` adds up, over all channels.
    """
    # Bits 0 and 1 of a channel's number make a pair, bits 2 and 3 and so on: minus if an odd number of pairs are 11.
    channel = torch.arange(head_dim, device=device)
    odd = channel & (channel >> 1) & 0x5555
    for bits in (8, 4, 2):
        odd ^= odd >> bits
    return (1 - 2 * (odd & 1)).float()


def butterflies(tokens: torch.Tensor) -> torch.Tensor:
    """Multiplies runs of 2^stages_of(D) channels of [..., D] by a Hadamard matrix, by sums and differences of two.

    Their order is fixed, so that results are bitwise identical wherever they are computed.
    """
    for stage in range(stages_of(tokens.shape[-1])):
        first, second = tokens.unflatten(-1, (-1, 2, 1 << stage)).unbind(-2)
        tokens = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return tokens


def rotated(tokens: torch.Tensor) -> torch.Tensor:
    """Rotates float32[..., D] as int8 rows are, without rounding."""
    head_dim = tokens.shape[-1]
    return butterflies(tokens * signs(head_dim, tokens.device)) * norm_of(head_dim)


def quantise_segments(
    source: torch.Tensor,
    destination: torch.Tensor,
    segments: CopySegments,
    less: torch.Tensor | None = None,
    *,
    rotate: bool = True,
) -> None:
    """Copies segments from tokens to rows of int8: number / scale, to the nearest, halves to even.

    A token's scale is its largest magnitude / 127. One with a number that is not finite gets scale NaN.

    Args:
        source: [B, heads, tokens, D], floating-point, any strides.
        destination: int32[B, heads, tokens, row_words(D)]; views with words side by side are welcome. A buffer
            [tokens, B, row_words(D)] is one head.
        segments: Without zeros.
        less: float32[B, source's heads, D], what is subtracted from every token beforehand. None: nothing.
        rotate: True if tokens are rotated before they are rounded, which spreads a large number over the channels:
            signs change (`signs`), then `butterflies`, whose norm is in the scale.
    """
    destination = as_heads(destination)
    if source.is_cuda:
        from dbsp_kernels.triton.exchange import triton_quantise_segments  # here: triton need not be installed

        triton_quantise_segments(source, destination, segments.table, segments.mean, less, rotate)
        return
    from_head, from_token, to_head, to_token, *_ = segments.positions
    values = source[:, from_head, from_token].to(torch.float32)
    if less is not None:
        values -= less[:, from_head]
    destination[:, to_head, to_token] = rows_of_tokens(values, rotate)


def rows_of_tokens(tokens: torch.Tensor, rotate: bool = True) -> torch.Tensor:
    """Quantizes float32[..., D] to int32[..., row_words(D)], by torch's own operations; see `quantise_segments`."""
    head_dim = tokens.shape[-1]
    if rotate:
        tokens = butterflies(tokens * signs(head_dim, tokens.device))
    largest = tokens.abs().amax(dim=-1)  # NaN where one is
    scale = largest / LARGEST
    scale = torch.where(largest.isfinite(), scale, torch.nan).masked_fill_(largest < TINY, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    rows = tokens.new_zeros(*tokens.shape[:-1], row_words(head_dim), dtype=torch.int32)
    rows.view(torch.int8)[..., :head_dim] = (tokens / divisor[..., None]).round_().nan_to_num_(0.0)
    rows.view(torch.float32)[..., -1] = scale * norm_of(head_dim) if rotate else scale
    return rows


def restore_rows(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Tokens [..., D] of a floating-point dtype from contiguous rows int32[..., row_words(D)]: number · scale."""
    tokens = rows.new_empty(*rows.shape[:-1], head_dim, dtype=dtype)
    return torch.mul(rows.view(torch.int8)[..., :head_dim], rows.view(torch.float32)[..., -1:], out=tokens)


def rotate_segments(source: torch.Tensor, destination: torch.Tensor, segments: CopySegments) -> None:
    """Copies segments of rotated tokens, and rotates them back: the opposite of what `quantise_segments` does first.

    Args:
        source: A contiguous buffer [tokens, B, D], or of int8 rows, int32[tokens, B, row_words(D)].
        destination: [B, heads, tokens, D], floating-point, any strides.
    """
    head_dim = destination.shape[-1]
    if destination.is_cuda:
        from dbsp_kernels.triton.exchange import triton_rotate_segments  # here: triton need not be installed

        triton_rotate_segments(source, destination, segments)
        return
    _, from_token, to_head, to_token, zero_head, zero_token = segments.positions
    tokens = source[from_token].transpose(0, 1)  # [B, copied tokens, W]
    wide = torch.promote_types(destination.dtype, torch.float32)
    tokens = restore_rows(tokens.contiguous(), head_dim, wide) if tokens.dtype == torch.int32 else tokens.to(wide)
    tokens = butterflies(tokens) * (signs(head_dim, tokens.device).to(wide) * norm_of(head_dim))
    destination[:, to_head, to_token] = tokens.to(destination.dtype)
    destination[:, zero_head, zero_token] = 0


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
        *positions, zero_head, zero_token = of_source.positions
        if add:
            from_head, from_token, to_head, to_token = positions
            destination[:, to_head, to_token] += source[:, from_head, from_token]
            continue
        _copy_rows(source, destination, positions)
        if len(zero_head):
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


def _copy_rows(source: torch.Tensor, destination: torch.Tensor, positions: Sequence[torch.Tensor]) -> None:
    """Copies tokens by rows of memory, which torch does several times as fast as by indices of head and token.

    Args:
        source, destination: [B, heads, tokens, D].
        positions: int64[n] each: from_head, from_token, to_head, to_token.
    """
    from_head, from_token, to_head, to_token = positions
    views, indices = [], []
    for tensor, head, token in ((source, from_head, from_token), (destination, to_head, to_token)):
        *sizes, width = tensor.shape
        *strides, last = (
            stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        if tensor.numel() == 0 or (last != 1 and width > 1) or any(stride % width for stride in strides):
            destination[:, to_head, to_token] = source[:, from_head, from_token]  # no row of memory has a token
            return
        of_batch, of_head, of_token = (stride // width for stride in strides)
        index = token if of_token == 1 else token * of_token  # each operation here takes as long as copying 100 tokens
        if of_head:
            index = index.add(head, alpha=of_head)
        if sizes[0] > 1:
            index = (torch.arange(sizes[0], device="cpu")[:, None] * of_batch + index).flatten()
        count = 1 + sum((size - 1) * stride // width for size, stride in zip(sizes, strides, strict=True))
        views.append(tensor.as_strided((count, width), (width, 1)))
        indices.append(index)
    views[1].index_copy_(0, indices[1], views[0].index_select(0, indices[0]))


def as_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [B, heads, tokens, D] itself, and a buffer [tokens, B, D] as one head of it."""
    return tensor.transpose(0, 1).unsqueeze(1) if tensor.ndim == 3 else tensor
