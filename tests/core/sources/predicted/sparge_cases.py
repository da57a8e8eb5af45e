"""Functions that workers run: predictors from pooled queries and keys, SpargeAttn's or another's, on shared tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource
from tests.support.attention_cases import shards


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


def predict_together(rank: int, world: int, case: SpargeCase, strategy: str) -> tuple[int, int]:
    """Returns the fingerprints of the mask and of the plan on this rank."""
    parsed = Strategy.parse(strategy)
    tokens = local_tokens(rank, world, case, parsed)
    mask = case.source.mask(case.request, tokens)
    return mask.fingerprint, make_plan(mask, parsed, layout=tokens.layout).fingerprint


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
