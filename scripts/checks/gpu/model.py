"""A diffusion transformer in plain torch, shaped as Wan's: diffusers is not on every machine."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v, gate), each [B, H, n, D], to the self-attention [B, H, n, D]."""


class Block(nn.Module):
    """Self-attention, cross-attention to text, and an MLP."""

    def __init__(self, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        width = heads * head_dim
        self.heads = heads
        self.qkv, self.gate, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)
        self.query, self.text, self.cross = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, ffn), nn.GELU(), nn.Linear(ffn, width))

    def forward(self, x: torch.Tensor, text: torch.Tensor, layer: int, attend: Attend) -> torch.Tensor:
        normed = F.layer_norm(x, x.shape[-1:])
        q, k, v = map(self._by_head, self.qkv(normed).chunk(3, dim=-1))
        gate = self._by_head(self.gate(normed))
        x = x + self.out(attend(layer, q, k, v, gate).transpose(1, 2).flatten(2))
        keys, values = map(self._by_head, self.text(text).chunk(2, dim=-1))
        query = self._by_head(self.query(F.layer_norm(x, x.shape[-1:])))
        x = x + self.cross(F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2))
        return x + self.mlp(F.layer_norm(x, x.shape[-1:]))

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [B, n, H · D] as [B, H, n, D]."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


class Transformer(nn.Module):
    """Blocks with random weights."""

    def __init__(self, layers: int, heads: int, head_dim: int, ffn: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(heads, head_dim, ffn) for _ in range(layers))

    def forward(self, x: torch.Tensor, text: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Computes x [B, n, H · D] and text [B, m, H · D] to [B, n, H · D]."""
        for layer, block in enumerate(self.blocks):
            x = block(x, text, layer, attend)
        return x


def random_transformer(
    layers: int, heads: int, head_dim: int, ffn: int, device: str, dtype: torch.dtype
) -> Transformer:
    """Makes a transformer with the same weights at every call, made on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        return Transformer(layers, heads, head_dim, ffn).to(dtype).eval().requires_grad_(False)
