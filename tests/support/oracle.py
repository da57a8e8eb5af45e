"""The oracle: attention in one process with the dense mask, float64, written without any of the code under test."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask


def token_mask(mask: BlockMask, queries: torch.Tensor | None = None) -> torch.Tensor:
    """Returns bool[H, n, N] from the block mask: for each token its row of blocks, and of that each token's column.

    queries: tokens whose rows are wanted, in token order; default all
    """
    q_block, k_block = (
        torch.repeat_interleave(torch.tensor(axis.lengths)) for axis in (mask.grid.q_axis, mask.grid.k_axis)
    )
    heads = []
    for head in range(mask.heads):
        position = position_in_order(mask.grid, head)
        rows = position if queries is None else position[queries]
        heads.append(mask.bits[head][q_block[rows]][:, k_block[position]])
    return torch.stack(heads)


def position_in_order(grid: BlockGrid, head: int) -> torch.Tensor:
    """Returns int64[N], each token's position in a head's blocks, counted token by token."""
    order = grid.orders[head if len(grid.orders) > 1 else 0]
    if order == "thw" or grid.thw is None:
        return torch.arange(grid.tokens)
    coordinates = list(itertools.product(*(range(size) for size in grid.thw)))
    if order.startswith("tile:"):
        tile = [int(size) for size in order[5:].split("x")]
        keys = [[*(c // s for c, s in zip(at, tile, strict=True)), *at] for at in coordinates]
    else:
        keys = [[at["thw".index(axis)] for axis in order] for at in coordinates]
    token_permutation = sorted(range(len(keys)), key=keys.__getitem__)
    slot = torch.empty(len(token_permutation), dtype=torch.long)
    slot[torch.tensor(token_permutation)] = torch.arange(len(token_permutation))
    return torch.cat([torch.arange(grid.text_tokens), grid.text_tokens + slot])


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, queries: torch.Tensor
) -> torch.Tensor:
    """Attends from tokens `queries` (positions in token order) to all. Empty rows give zeros.

    Absent keys of the mask are one more column of scores, whose value is zero.
    """
    allowed = token_mask(mask, queries)
    scores = (q.double() @ k.double().transpose(-1, -2)) * q.shape[-1] ** -0.5
    some = allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~allowed & some, -torch.inf)
    if mask.absent is not None:
        block = torch.repeat_interleave(torch.tensor(mask.grid.q_axis.lengths))
        of_heads = [mask.absent[h, block[position_in_order(mask.grid, h)[queries]]] for h in range(mask.heads)]
        absent = torch.stack(of_heads).double()[..., None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, absent], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : v.shape[-2]]
    return (weights @ v.double()).masked_fill(~some, 0.0)


def rounded_to_int8(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    """Rounds q, k less its mean, and v, each [B, H, N, D], rotated, to int8 with a scale a token; returns float64.

    The mean is added to k again.
    """
    mean = mean_of(k)
    rows = [int8_of(tokens.numpy()) for tokens in (q.float(), k.float() - mean, v.float())]
    restored = [torch.from_numpy(numbers.astype(np.float32) * scale[..., None]) for numbers, scale in rows]
    rounded_q, rounded_k, rounded_v = (rotated_back(tokens.to(q.dtype)) for tokens in restored)
    return [rounded_q, rounded_k + mean, rounded_v]


def mean_of(k: torch.Tensor) -> torch.Tensor:
    """Returns float32[B, H, 1, D], the mean of the tokens of k [B, H, N, D]."""
    units = np.floor(k.float().double().numpy() * 2.0**32).astype(np.int64)
    return torch.from_numpy((units.sum(axis=2, keepdims=True) * 2.0**-32 / k.shape[2]).astype(np.float32))


def int8_of(tokens: np.ndarray, rotate: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Returns int8[..., D] and float32[...], the scale of each token, of float32[..., D]."""
    norm = np.float32(1)
    if rotate:
        tokens, norm = hadamard(tokens * signs(tokens.shape[-1])), np.float32(run_of(tokens.shape[-1]) ** -0.5)
    scale = np.abs(tokens).max(axis=-1) / np.float32(127)
    divisor = np.where(scale > 0, scale, np.float32(1))
    return np.rint(tokens / divisor[..., None]).astype(np.int8), scale * norm


def run_of(head_dim: int) -> int:
    """Returns how many channels are rotated together."""
    return next(run for run in (2**n for n in range(20, -1, -1)) if head_dim % run == 0)


def signs(head_dim: int) -> np.ndarray:
    """Returns float32[D]: −1 where an odd number of the digits of a channel, in base 4, are 3."""
    threes = [np.base_repr(channel, 4).count("3") for channel in range(head_dim)]
    return np.where(np.array(threes) % 2, np.float32(-1), np.float32(1))


def hadamard(tokens: np.ndarray) -> np.ndarray:
    """Multiplies runs of channels by a Hadamard matrix: neighbours first, then what became of even and odd ones."""

    def recurse(run: np.ndarray) -> np.ndarray:
        if run.shape[-1] == 1:
            return run
        even, odd = run[..., 0::2], run[..., 1::2]
        return np.stack([recurse(even + odd), recurse(even - odd)], axis=-1).reshape(run.shape)

    run = run_of(tokens.shape[-1])
    return recurse(tokens.reshape(*tokens.shape[:-1], -1, run)).reshape(tokens.shape)


def rotated_back(tokens: torch.Tensor) -> torch.Tensor:
    """Returns float64[..., D], what was rotated to tokens."""
    head_dim = tokens.shape[-1]
    return torch.from_numpy(hadamard(tokens.double().numpy()) * signs(head_dim) * run_of(head_dim) ** -0.5)


def largest_difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns 0 without numbers, and infinity if one is NaN, which Python's `max` of several would pass over."""
    return float((out - expected).detach().abs().nan_to_num(torch.inf, torch.inf).max()) if out.numel() else 0.0
