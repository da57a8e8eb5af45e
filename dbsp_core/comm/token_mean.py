"""The mean of all ranks' tokens, by head and channel: the same bits however tokens are distributed."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.prediction.pooling import MEAN_UNIT, BlockRuns, block_runs, sum_tokens

__all__ = ["mean_bytes", "mean_of_tokens"]

BLOCK = 256
"""Tokens that are summed at a time, so that a GPU has work for all of its multiprocessors."""


class _OwnTokens(NamedTuple):
    """A rank's places with a token, in blocks: arguments of `sum_tokens`."""

    place: torch.Tensor
    first: torch.Tensor
    runs: BlockRuns


def mean_of_tokens(tokens: torch.Tensor, layout: SequenceLayout, group: SequenceGroup) -> torch.Tensor:
    """float32[B, H, D], the mean over all tokens of a layout, from a rank's [B, H, n_local, D]. Collective.

    Padding does not count. Sums are of integers: no order, and no number of ranks, changes them. What is not finite,
    and magnitudes beyond 2^15, count as `sum_tokens` has them.
    """
    own = _own_tokens(layout, group.rank, tokens.device)
    width = tokens.shape[-1]
    sums = sum_tokens(tokens, *own)[..., :width].sum(dim=2)  # [H, B, D]
    everyone = group.all_gather_along(sums[None].contiguous()).sum(dim=0)
    mean = everyone.to(torch.float64) * (MEAN_UNIT / layout.tokens)
    return mean.to(torch.float32).transpose(0, 1).contiguous()


def mean_bytes(batch: int, heads: int, width: int, ranks: int) -> int:
    """Bytes that a rank sends to others for one mean."""
    return 8 * batch * heads * width * (ranks - 1)


@functools.lru_cache(maxsize=8)  # the same at every attention of a video size
def _own_tokens(layout: SequenceLayout, rank: int, device: torch.device) -> _OwnTokens:
    place = layout.tokens_at(rank)[1]
    first = np.append(np.arange(0, len(place), BLOCK), len(place))
    return _OwnTokens(to_device(place, device), to_device(first, device), block_runs(np.diff(first)))
