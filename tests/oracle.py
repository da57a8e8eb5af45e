"""The oracle: attention in one process with the dense mask, float64, written without any of the code under test."""

from __future__ import annotations

import torch

from dbsp_core import BlockMask


def token_mask(mask: BlockMask) -> torch.Tensor:
    """bool[H, N, N] from the block mask: each block's value, repeated over its tokens."""
    q_lengths = torch.tensor(mask.grid.q_axis.lengths)
    k_lengths = torch.tensor(mask.grid.k_axis.lengths)
    return mask.bits.repeat_interleave(q_lengths, 1).repeat_interleave(k_lengths, 2)


def dense_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    queries: torch.Tensor,
    keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the tokens `queries` (positions in token order) to `keys` (default: all). Empty rows give zeros."""
    allowed = token_mask(mask)[:, queries]
    if keys is not None:
        allowed = allowed[:, :, keys]
    scores = (q.double() @ k.double().transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return weights @ v.double()
