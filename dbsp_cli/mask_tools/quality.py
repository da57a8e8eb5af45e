"""Loss of accuracy from skipping blocks, measured on synthetic tokens: a guard against masks that cannot be right.

The tokens are seeded and smooth over time, height and width, as videos are: tokens near each other have like queries,
keys and values, so attention is mostly local. A mask that keeps the near blocks changes little; one that was made for
another video size, token order or model changes much. The numbers say nothing about a model's own pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.utils.errors import UserError

DEFAULT_LIMIT = 0.1
"""Relative L1 error above which `dbsp masks info` warns."""

_SHARPNESS = 5.0
"""q·k · scale of a token with itself, less the logarithm of the number of tokens, so that the many far ones together
weigh little against the few near ones for any size of video. At 5, sparse local masks err by 0.01 to 0.08, and the
same blocks read in another token order by more than 0.1."""
_CELL = (2, 4, 4)
"""Frames, rows and columns over which tokens change."""


@dataclass(frozen=True)
class HeadError:
    """A head's Σ|sparse − dense| / Σ|dense| over the sampled queries, and the density of its mask."""

    head: int
    density: float
    error: float


def smooth_tokens(
    thw: tuple[int, int, int], text_tokens: int = 0, heads: int = 1, head_dim: int = 32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Makes q, k, v, float32[1, heads, text_tokens + t·h·w, head_dim], smooth over t, h and w; text is random.

    q = k, so that q·k is largest where two tokens lie near each other; meant for a scale of head_dim ** -0.5.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = [-(-size // cell) + 1 for size, cell in zip(thw, _CELL, strict=True)]
    noise = torch.randn(2 * heads, head_dim, *coarse, generator=generator, device="cpu")
    video = torch.cat([F.interpolate(one[None], size=thw, mode="trilinear", align_corners=True) for one in noise])
    text = torch.randn(2 * heads, head_dim, text_tokens, generator=generator, device="cpu")
    tokens = torch.cat([text, video.flatten(2)], dim=2).transpose(1, 2)
    features, v = F.normalize(tokens[:heads], dim=-1), tokens[heads:]
    sharpness = _SHARPNESS + math.log(tokens.shape[1])
    q = features * (sharpness * head_dim**0.5) ** 0.5
    return q[None], q[None].clone(), v[None]


def sparse_errors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    *,
    heads: Sequence[int] | None = None,
    queries: int = 128,
    seed: int = 0,
) -> list[HeadError]:
    """Measures the relative L1 error of block-sparse against dense attention, of scale D ** -0.5.

    Queries whose row of blocks is empty count as zeros.

    Args:
        q, k, v: [1, H or 1, tokens, D] by canonical position; one head of tokens is used for every head of the mask.
        heads: Heads of the mask to measure; all by default.
        queries: Number of tokens to compare, drawn by `seed`: memory and time are queries × tokens a head.

    Raises:
        UserError: The tensors don't fit the mask.
    """
    tokens = mask.grid.tokens
    if mask.grid.packed_from:
        raise UserError("errors are measured of one sequence at a time; give the masks of a packed one by itself")
    if q.ndim != 4 or q.shape[0] != 1 or q.shape[1] not in (1, mask.heads) or q.shape[2] != tokens:
        raise UserError(
            f"q of shape {tuple(q.shape)} does not fit the mask: expected [1, {mask.heads} or 1, {tokens}, D]"
        )
    if k.shape != q.shape or v.shape[:3] != q.shape[:3]:
        raise UserError(f"k {tuple(k.shape)} and v {tuple(v.shape)} must have the shape of q {tuple(q.shape)}")
    drawn = np.sort(np.random.default_rng(seed).permutation(tokens)[:queries])
    q, k, v = (one[0].expand(mask.heads, -1, -1) for one in (q[:, :, torch.from_numpy(drawn)], k, v))
    results = []
    for head in range(mask.heads) if heads is None else heads:
        scores = q[head].float() @ k[head].float().T * q.shape[-1] ** -0.5
        allowed = _allowed(mask, head, drawn).to(scores.device)
        sparse = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).nan_to_num(0.0) @ v[head].float()
        dense = scores.softmax(dim=-1) @ v[head].float()
        error = float((sparse - dense).abs().sum() / dense.abs().sum().clamp(min=1e-30))
        results.append(HeadError(head, float(mask.bits[head].float().mean()), error))
    return results


def _allowed(mask: BlockMask, head: int, queries: np.ndarray) -> torch.Tensor:
    """Returns bool[queries, tokens] by canonical position."""
    grid = mask.grid
    position = np.argsort(grid.token_permutation(grid.order_of(head)))
    rows = torch.from_numpy(grid.q_axis.block_of[position[queries]])
    columns = torch.from_numpy(grid.k_axis.block_of[position])
    return mask.bits[head].cpu()[rows][:, columns]
