"""Queries and keys of the small numeric examples of masks that models are served with."""

from __future__ import annotations

import torch


def waves(tokens: int, head_dim: int, by_token: float, by_channel: float, phase: float) -> torch.Tensor:
    """Returns float32[1, 1, tokens, head_dim], computed in float64."""
    i, j = torch.arange(tokens).double()[:, None], torch.arange(head_dim).double()
    values = torch.sin(by_token * i + by_channel * j + phase) + 0.5 * torch.cos(0.31 * i * (j + 1))
    return values[None, None].float()


def example(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns q and k."""
    return waves(tokens, head_dim, 0.9, 0.7, 0.3), waves(tokens, head_dim, 0.5, 1.1, 1.0)
