"""para-attn's first-block cache on top: all ranks skip the same steps, the ones that one process would skip."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_diffusers.caching import ForwardRanks

__all__ = ["Parallelized", "with_real_tokens"]


@dataclass(frozen=True, eq=False)
class Parallelized:
    """What `transformer._is_parallelized` is under db-SP. para-attn asks whether it is true, and its first-block cache
    hands it on to the function that compares a pass's first residual with the last computed pass's.

    Left to itself, that averages the ranks' means over all ranks there are, and over padding as well.
    """

    together: ForwardRanks

    def are_similar(self, before: torch.Tensor, now: torch.Tensor, threshold: float) -> bool:
        """Whether mean |before − now| is below threshold · mean |before|, over the real tokens of all ranks.

        before, now: [B, shard, C]. Collective. The same answer on every rank.
        """
        if threshold <= 0 or before.shape != now.shape:
            return False
        difference, size = self.together.change(before, now)
        return difference < threshold * size


def with_real_tokens(original: Callable[..., bool]) -> Callable[..., bool]:
    """para-attn's `are_two_tensors_similar`, which leaves the residuals of db-SP's transformers to `Parallelized`."""

    @torch.compiler.disable
    @functools.wraps(original)
    def are_similar(t1: torch.Tensor, t2: torch.Tensor, *, threshold: float, parallelized: Any = False) -> bool:
        if isinstance(parallelized, Parallelized):
            return parallelized.are_similar(t1, t2, threshold)
        return original(t1, t2, threshold=threshold, parallelized=parallelized)

    return are_similar
