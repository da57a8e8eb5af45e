"""Packed attentions to try kernels on, and attention written out in float64. No test library needed here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_kernels import Kernel, block_attention


@dataclass(frozen=True)
class Packed:
    """The arguments of `block_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor

    def attend(
        self, kernel: str | Kernel, scale: float | None = None, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables = (self.kv_index, self.kv_count, self.kv_len)
        return block_attention(self.q, self.k, self.v, *tables, scale=scale, kernel=kernel, **options)

    def exact(self, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the reference kernel's result in float64."""
        return replace(self, q=self.q.double(), k=self.k.double(), v=self.v.double()).attend("reference", scale)

    def to(self, device: str) -> Packed:
        return Packed(*(t.to(device) for t in vars(self).values()))


def packed(rows=5, blocks=6, block_q=8, block_k=4, head_dim=16, dtype=torch.float32, seed=0) -> Packed:
    """Rows of every length, none at all included; short blocks; rubbish in unused entries and beyond lengths."""
    rng = np.random.default_rng(seed)
    index = rng.permuted(np.tile(np.arange(blocks), (rows, 1)), axis=1)
    count = rng.integers(blocks + 1, size=rows)
    index[np.arange(blocks) >= count[:, None]] = -7
    length = np.where(rng.random(blocks) < 0.5, block_k, rng.integers(1, block_k + 1, size=blocks))
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape)).to(dtype)
        for shape in ((rows, block_q, head_dim), (blocks, block_k, head_dim), (blocks, block_k, head_dim))
    )
    for block, n in enumerate(length):
        k[block, n:], v[block, n:] = 1e4, -1e4
    return Packed(q, k, v, *(torch.from_numpy(a.astype(np.int32)) for a in (index, count, length)))


def written_out(p: Packed, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention in float64, computed query by query."""
    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t.double().numpy() for t in (p.q, p.k, p.v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, count in enumerate(p.kv_count.tolist()):
        seen = [(b, t) for b in p.kv_index[row, :count].tolist() for t in range(int(p.kv_len[b]))]
        for query in range(q.shape[1]) if seen else ():
            scores = np.array([q[row, query] @ k[b, t] for b, t in seen]) * scale
            weights = np.exp(scores - scores.max())
            lse[row, query] = scores.max() + np.log(weights.sum())
            out[row, query] = (weights / weights.sum()) @ np.array([v[b, t] for b, t in seen])
    return torch.from_numpy(out), torch.from_numpy(lse)


def rounded_to_int8(p: Packed) -> Packed:
    """Returns the attention in float64 of the queries and keys that kernel `triton-int8` multiplies."""
    real = torch.arange(p.k.shape[1], device=p.k.device) < p.kv_len[:, None]
    k = p.k.masked_fill(~real[..., None], 0)
    return replace(p, q=int8_and_back(p.q, (2,)), k=int8_and_back(k, (1, 2)), v=p.v.double())


def int8_and_back(tokens: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Rounds to int8 as `triton-int8` does, to float64: one scale over `dims`, for a query or a block of keys."""
    tokens = tokens.float()
    largest = tokens.abs().amax(dims, keepdim=True)
    scale = torch.where(largest < 2.0**-50, 1.0, largest / 127)
    return (tokens / scale).round().double() * scale


def kinder(p: Packed) -> Packed:
    """Returns the rows with their full blocks first, so that `full_counts` may be passed as a hint."""
    index = p.kv_index.clone()
    for row, count in enumerate(p.kv_count.tolist()):
        entries = index[row, :count].tolist()
        index[row, :count] = torch.tensor(sorted(entries, key=lambda b: int(p.kv_len[b]) < p.k.shape[1])).int()
    return replace(p, kv_index=index)


def full_counts(p: Packed) -> torch.Tensor:
    """Returns kv_full for rows whose full blocks come first."""
    listed = torch.arange(p.kv_index.shape[1]) < p.kv_count[:, None]
    full = p.kv_len[p.kv_index.long().clamp(min=0)] == p.k.shape[1]
    return (listed & full).sum(1).int()


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ‖out − expected‖ / ‖expected‖, or infinity for NaN and missing values."""
    error = (out.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)
    return float(error) if bool(error.isfinite()) else float("inf")
