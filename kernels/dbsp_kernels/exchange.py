"""Copying token segments and quantizing them to int8 rows, to pack and unpack exchanges."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbsp_kernels.rounding import LARGEST, TINY, norm_of, stages_of
from dbsp_kernels.segments import CopySegments


def row_words(head_dim: int) -> int:
    """Returns the int32 words of one int8 token, including its scale."""
    return -(-head_dim // 4) + 1


def signs(head_dim: int, device: torch.device) -> torch.Tensor:
    """Returns float32[D] of ±1.0, by which rotation multiplies channels before `butterflies`.

    Without signs, an offset common to all channels would end up in one channel. These signs are a bent function, which
    spreads that offset, and every other pattern that `butterflies` sums, over all channels.
    """
    # Pair up a channel number's bits (0 and 1, 2 and 3, …): negative if an odd number of pairs are 11.
    channel = torch.arange(head_dim, device=device)
    odd = channel & (channel >> 1) & 0x5555
    for bits in (8, 4, 2):
        odd ^= odd >> bits
    return (1 - 2 * (odd & 1)).float()


def butterflies(tokens: torch.Tensor) -> torch.Tensor:
    """Multiplies runs of 2^stages_of(D) channels of [..., D] by a Hadamard matrix, by pairwise sums and differences.

    The order is fixed, so results are bitwise identical on all devices.
    """
    for stage in range(stages_of(tokens.shape[-1])):
        first, second = tokens.unflatten(-1, (-1, 2, 1 << stage)).unbind(-2)
        tokens = torch.stack((first + second, first - second), dim=-2).flatten(-3)
    return tokens


def rotated(tokens: torch.Tensor) -> torch.Tensor:
    """Rotates float32[..., D] like int8 rows, without rounding."""
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
    """Quantizes segments of tokens to int8 rows: value / scale, rounded half to even.

    A token's scale is its largest magnitude / 127, or NaN if any value is not finite.

    Args:
        source: [B, heads, tokens, D], floating-point, any strides.
        destination: int32[B, heads, tokens, row_words(D)], last dimension contiguous; or as [tokens, B, row_words(D)].
        segments: Without zeros.
        less: float32[B, source's heads, D], subtracted from every token first. None: nothing.
        rotate: True to rotate tokens before rounding (`signs`, then `butterflies`, whose norm goes into the scale),
            which spreads outliers over all channels.
    """
    destination = as_heads(destination)
    if source.is_cuda:
        from dbsp_kernels.triton.exchange import triton_quantise_segments  # here: triton need not be installed

        triton_quantise_segments(source, destination, segments, less, rotate)
        return
    from_head, from_token, to_head, to_token, *_ = segments.positions
    values = source[:, from_head, from_token].to(torch.float32)
    if less is not None:
        values -= less[:, from_head]
    destination[:, to_head, to_token] = rows_of_tokens(values, rotate)


def rows_of_tokens(tokens: torch.Tensor, rotate: bool = True) -> torch.Tensor:
    """Quantizes float32[..., D] to int32[..., row_words(D)] in plain torch; see `quantise_segments`."""
    head_dim = tokens.shape[-1]
    if rotate:
        tokens = butterflies(tokens * signs(head_dim, tokens.device))
    largest = tokens.abs().amax(dim=-1)  # propagates NaN
    scale = largest / LARGEST
    scale = torch.where(largest.isfinite(), scale, torch.nan).masked_fill_(largest < TINY, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf)
    rows = tokens.new_zeros(*tokens.shape[:-1], row_words(head_dim), dtype=torch.int32)
    rows.view(torch.int8)[..., :head_dim] = (tokens / divisor[..., None]).round_().nan_to_num_(0.0)
    rows.view(torch.float32)[..., -1] = scale * norm_of(head_dim) if rotate else scale
    return rows


def restore_rows(rows: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes contiguous rows int32[..., row_words(D)] to floating-point tokens [..., D]."""
    tokens = rows.new_empty(*rows.shape[:-1], head_dim, dtype=dtype)
    return torch.mul(rows.view(torch.int8)[..., :head_dim], rows.view(torch.float32)[..., -1:], out=tokens)


def rotate_segments(source: torch.Tensor, destination: torch.Tensor, segments: CopySegments) -> None:
    """Copies segments of rotated tokens and undoes the rotation of `quantise_segments`.

    From a contiguous buffer of tokens [tokens, B, D] or int8 rows int32[tokens, B, row_words(D)] to floating-point
    [B, heads, tokens, D] of any strides.
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
    """Copies segments of up to three sources, such as q, k and v, in one launch on GPUs, or adds tokens.

    Tensors are [B, heads, tokens, D] with equal B, D, dtype and device, any strides; buffers [tokens, B, D] count as
    one head. `segments` has those of each source, which must have no zeros to `add`; no two write to one slot. Slots
    outside the segments are left unchanged.
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
    """Copies segments of one source to two destinations like `copy_segments`; `segments` has one per destination."""
    if source.is_cuda:
        from dbsp_kernels.triton.exchange import triton_copy_to_both  # here: triton need not be installed

        triton_copy_to_both(source, destinations, segments)
        return
    for destination, of_destination in zip(destinations, segments, strict=True):
        copy_segments([source], destination, [of_destination])


def _copy_rows(source: torch.Tensor, destination: torch.Tensor, positions: Sequence[torch.Tensor]) -> None:
    """Copies tokens by memory row, which is several times faster in torch than indexing by head and token."""
    from_head, from_token, to_head, to_token = positions
    views, indices = [], []
    for tensor, head, token in ((source, from_head, from_token), (destination, to_head, to_token)):
        *sizes, width = tensor.shape
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        *strides, last = (stride if size > 1 else 0 for size, stride in steps)
        if tensor.numel() == 0 or (last != 1 and width > 1) or any(stride % width for stride in strides):
            destination[:, to_head, to_token] = source[:, from_head, from_token]  # tokens are not memory rows
            return
        of_batch, of_head, of_token = (stride // width for stride in strides)
        index = token if of_token == 1 else token * of_token  # an operation costs like copying 100 tokens
        if of_head:
            index = index.add(head, alpha=of_head)
        if sizes[0] > 1:
            index = (torch.arange(sizes[0], device="cpu")[:, None] * of_batch + index).flatten()
        count = 1 + sum((size - 1) * stride // width for size, stride in zip(sizes, strides, strict=True))
        views.append(tensor.as_strided((count, width), (width, 1)))
        indices.append(index)
    views[1].index_copy_(0, indices[1], views[0].index_select(0, indices[0]))


def as_heads(tensor: torch.Tensor) -> torch.Tensor:
    """Returns [B, heads, tokens, D] unchanged and a buffer [tokens, B, D] as [B, 1, tokens, D]."""
    return tensor.transpose(0, 1).unsqueeze(1) if tensor.ndim == 3 else tensor
