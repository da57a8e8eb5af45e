"""para-attn's first-block cache with db-SP: all ranks skip the steps that one process would skip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dbsp_diffusers.sharding.step_caches import ForwardRanks

__all__ = ["over_real_tokens"]


def over_real_tokens(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps para-attn's `are_two_tensors_similar` to compare the real tokens of all ranks where db-SP shards them.

    The cache passes on the transformer's `_is_parallelized`, with the first block's residuals of the last computed
    pass and of this one: [B, shard, C]. para-attn itself averages the means of all ranks there are, with padding. The
    wrapper is collective, and returns the same on every rank.
    """

    @torch.compiler.disable
    @functools.wraps(original)
    def are_similar(t1: torch.Tensor, t2: torch.Tensor, *, threshold: float, parallelized: Any = False) -> bool:
        if not isinstance(parallelized, ForwardRanks):
            return original(t1, t2, threshold=threshold, parallelized=parallelized)
        if threshold <= 0 or t1.shape != t2.shape:
            return False
        difference, size = parallelized.change(t1, t2)
        return difference < threshold * size

    return are_similar
