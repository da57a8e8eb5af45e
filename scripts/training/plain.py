"""Attention written out in bfloat16: on CPUs its backward pass takes a half to a fifth of the fused one's time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

_TOGETHER = 1 << 22  # probabilities at a time: what fits in a cache


@contextmanager
def written_out() -> Iterator[None]:
    """Within it, torch's attention is `plain_attention`: diffusers' blocks have no option for that."""
    with patch.object(F, "scaled_dot_product_attention", plain_attention):
        yield


def plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """softmax(q·k / √D + mask)·v. query, key, value: [B, H, tokens, D]"""
    batch, heads, tokens = query.shape[:3]
    with torch.autocast("cpu", enabled=False):
        parts = (part.bfloat16().flatten(0, 1) for part in (query * query.shape[-1] ** -0.5, key, value))
        mask = None if attn_mask is None else attn_mask.bfloat16().expand(batch, heads, -1, -1).flatten(0, 1)
        q, k, v = parts
        step = max(1, _TOGETHER // (tokens * k.shape[1]))
        outputs = []
        for at in range(0, batch * heads, step):
            here = slice(at, at + step)
            scores = q[here] @ k[here].transpose(1, 2)
            scores = scores if mask is None else scores + mask[here]
            outputs.append(scores.softmax(-1) @ v[here])
        return torch.cat(outputs).unflatten(0, (batch, heads))
