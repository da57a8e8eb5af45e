"""Predictions from pooled queries and keys, SpargeAttn's or another's; SpargeAttn's written out in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource
from tests.support.attention_cases import shards
from tests.support.oracle import position_in_order


@dataclass(frozen=True)
class SpargeCase:
    """One prediction. layout: a layout's name, or "shuffled" for tokens in no order at all; kind: of its source"""

    thw: tuple[int, int, int] = (5, 7, 9)
    text_tokens: int = 0
    heads: int = 5
    batch: int = 1
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    settings: dict[str, Any] = field(default_factory=lambda: {"cdf": 0.6, "similarity": 0.35})
    seed: int = 0
    kind: type[Any] = SpargeSource

    @property
    def source(self) -> Any:
        return self.kind(**{"block_q": 32, "block_k": 16, **self.settings})

    @property
    def request(self) -> MaskRequest:
        return MaskRequest(0, self.heads, self.thw, self.text_tokens)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns q and k of all tokens in token order, smooth over the video, so that blocks are equal in part."""
        rng = np.random.default_rng(self.seed)
        position = np.indices(self.thw).reshape(3, -1) / 4
        waves = rng.normal(size=(2, self.batch, self.heads, self.head_dim, 3))
        phase = rng.uniform(0, 7, (2, self.batch, self.heads, self.head_dim, 1))
        video = np.sin(waves @ position + phase).swapaxes(-1, -2) * rng.uniform(0.5, 3, (2, 1, self.heads, 1, 1))
        video += 0.4 * rng.normal(size=video.shape)
        text = rng.normal(size=(2, self.batch, self.heads, self.text_tokens, self.head_dim))
        q, k = torch.from_numpy(np.concatenate([text, video], axis=3)).to(self.dtype)
        return q, k

    def by_head(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns q and k as float64[B·H, N, D]."""
        q, k = (t.double().flatten(0, 1).numpy() for t in self.tensors())
        return q, k


def alone(case: SpargeCase) -> BlockMask:
    """Returns the mask of one process."""
    mask: BlockMask = case.source.mask(case.request, LocalQK.alone(*case.tensors()))
    return mask


def local_tokens(
    rank: int, world: int, case: SpargeCase, strategy: Strategy, grid: BlockGrid | None = None
) -> LocalQK:
    """Returns this rank's tokens, with rubbish in its padding. grid: that of the case's source if None."""
    grid = grid or case.source.grid(case.request)
    if case.layout == "shuffled":
        order = np.random.default_rng(7).permutation(grid.tokens)
        layout = SequenceLayout.from_streams([order], world)
    else:
        layout = SequenceLayout.named(case.layout, grid, strategy, streams="first")
    local, *_ = shards(list(case.tensors()), layout, rank, padded=True)
    return LocalQK(*local, layout, SequenceGroup.from_group(), case.head_dim**-0.5)


@dataclass(frozen=True)
class Margins:
    """Distances of decisions from their thresholds: [H, nq, nk] and [H, n]."""

    chosen: np.ndarray
    similar_q: np.ndarray
    similar_k: np.ndarray


def predict(
    q: np.ndarray,
    k: np.ndarray,
    grid: BlockGrid,
    *,
    cdf=None,
    topk=None,
    similarity=0.3,
    attention_sink=False,
    dense_text=True,
):
    """Returns (bool[H, nq, nk], margins) for q, k: float[H, N, D] in token order."""
    heads = len(q)
    token_permutation = np.argsort(position_in_order(grid, 0).numpy())
    bits = np.zeros((heads, grid.nq, grid.nk), dtype=bool)
    margins = Margins(
        np.full(bits.shape, np.inf), np.full((heads, grid.nq), np.inf), np.full((heads, grid.nk), np.inf)
    )
    for head in range(heads):
        mean_q, similar_q = pooled(q[head][token_permutation], grid.q_axis)
        mean_k, similar_k = pooled(k[head][token_permutation], grid.k_axis)
        margins.similar_q[head], margins.similar_k[head] = (
            np.abs(similar_q - similarity),
            np.abs(similar_k - similarity),
        )
        for i in range(grid.nq):
            scores = np.array([mean_q[i] @ mean_k[j] for j in range(grid.nk)]) * q.shape[-1] ** -0.5
            weights = np.where(similar_k > similarity, np.exp(scores - scores.max()), 0.0)
            chance = weights / max(weights.sum(), 1e-300)
            total = 0.0
            for rank, j in enumerate(np.argsort(-chance, kind="stable")):
                total += chance[j]
                if topk is not None:
                    take = rank < max(1, int(topk * grid.nk + 1e-9))
                else:
                    take = rank == 0 or cdf == 1 or total <= cdf
                    margins.chosen[head, i, j] = abs(total - cdf)
                bits[head, i, j] = take or similar_q[i] <= similarity or similar_k[j] <= similarity
    if attention_sink:
        bits[:, :, 0] = True
    if dense_text in (True, "rows"):
        bits[:, grid.q_axis.starts < grid.text_tokens] = True
    if dense_text in (True, "columns"):
        bits[:, :, grid.k_axis.starts < grid.text_tokens] = True
    return bits, margins


def pooled(tokens: np.ndarray, axis) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 means as float64 [n, D], and mean cosines of all pairs of each block's tokens [n]."""
    means, similar = [], []
    for start, length in zip(axis.starts, axis.lengths, strict=True):
        block = tokens[start : start + length].astype(np.float64)
        means.append(block.mean(axis=0))
        norms = np.linalg.norm(block, axis=1)
        cosines = [
            a @ b / (x * y) if x and y else 0.0
            for a, x in zip(block, norms, strict=True)
            for b, y in zip(block, norms, strict=True)
        ]
        similar.append(np.mean(cosines))
    return np.array(means, dtype=np.float32).astype(np.float64), np.array(similar)
