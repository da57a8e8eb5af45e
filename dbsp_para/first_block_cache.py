"""para-attn's first-block cache on top: all ranks skip the same steps, the ones that one process would skip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dbsp_diffusers.sharding.step_caches import ForwardRanks

__all__ = ["over_real_tokens"]


def over_real_tokens(original: Callable[..., bool]) -> Callable[..., bool]:
    """para-attn's `are_two_tensors_similar`, but over the real tokens of all ranks where db-SP sharded the tensors.

    The cache passes on the transformer's `_is_parallelized`, with the first block's residuals of the last computed
    pass and of this one: [B, shard, C]. para-attn itself averages the ranks' means over all ranks there are, and over
    padding as well. Collective then, and the same answer on every rank.
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
