"""SSTA: its window, scores and absent keys written out, and in numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK, MaskRequest, SstaSource
from dbsp_core.utils.errors import UserError
from tests.core.sources.predicted.sparge_cases import SpargeCase, alone
from tests.support.oracle import position_in_order

TILE = {"tile": (2, 4, 4), "block_q": 16, "block_k": 8, "topk": 8}
SstaCase = partial(SpargeCase, kind=SstaSource, heads=3)
CASES = {
    "tiles that divide the video": SstaCase(thw=(6, 16, 12), settings={**TILE, "window": (1, 3, 1)}),
    "smaller tiles at the far sides": SstaCase(thw=(5, 14, 15), settings={**TILE, "window": (3, 1, 3)}),
    "text, batch of two": SstaCase(thw=(3, 9, 13), text_tokens=45, batch=2, settings={**TILE, "window": (1, 1, 3)}),
    "no padding": SstaCase(thw=(5, 7, 11), settings={**TILE, "window": (1, 1, 1), "padding": "none"}),
    "many frames": SstaCase(thw=(33, 4, 6), text_tokens=3, heads=2, settings={**TILE, "window": (3, 1, 1)}),
    "an image": SstaCase(thw=(1, 40, 60), text_tokens=9, heads=2, settings={**TILE, "topk": 3}),
}


def written_out(case: SpargeCase) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns bool[B · H, N, N] of tokens in the video's order, and of each its absent slots and its gap [B · H, N].

    Video tokens are padded to whole tiles, and pairs of tiles are looked at one by one.
    """
    source, text = case.source, case.text_tokens
    is_image = case.thw[0] == 1
    size, topk = ((1, 16, 24), source.topk) if is_image else (source.tile, source.topk)
    topk = topk // 2 if 1 < case.thw[0] <= 31 else topk
    counts = [-(-n // side) for n, side in zip(case.thw, size, strict=True)]
    tiles = list(itertools.product(*map(range, counts)))
    at = np.stack(np.unravel_index(np.arange(math.prod(case.thw)), case.thw), axis=1) // np.array(size)
    tile_of = np.array([tiles.index(tuple(position)) for position in at])  # of each token of video
    near = np.zeros((len(tiles), len(tiles)), dtype=bool)
    for (i, a), (j, b) in itertools.product(enumerate(tiles), enumerate(tiles)):
        if not is_image:
            axes = zip(a, counts, source.window, strict=True)
            centre = [min(max(x, w // 2), max(n - 1 - w // 2, w // 2)) for x, n, w in axes]
            near[i, j] = all(abs(c - y) <= w // 2 for c, y, w in zip(centre, b, source.window, strict=True))
    bits, absent, gaps = [], [], []
    for q, k in zip(*case.by_head(), strict=True):
        padded = [
            np.stack([x[text:][tile_of == tile].sum(0) / math.prod(size) for tile in range(len(tiles))])
            for x in (q, k)
        ]
        unit_q, unit_k = (means / np.linalg.norm(means, axis=1, keepdims=True) for means in padded)
        same = (unit_k @ unit_k.T + 1) / 2
        redundancy = (same.sum(0) - np.diag(same)) / (len(tiles) - 1)
        scores = source.weight * (unit_q @ unit_k.T + 1) / 2 - (1 - source.weight) * redundancy
        kept = near.copy()
        for i, row in enumerate(scores):
            kept[i, np.argsort(-row, kind="stable")[:topk]] = True
        ordered = -np.sort(-scores, axis=1)
        empty = math.prod(size) - np.bincount(tile_of)
        of_tokens = np.ones((len(q), len(q)), dtype=bool)
        of_tokens[text:, text:] = kept[tile_of][:, tile_of]
        bits.append(of_tokens)
        absent.append(np.concatenate([np.full(text, empty.sum()), (kept @ empty)[tile_of]]))
        gaps.append(np.concatenate([np.full(text, 1.0), (ordered[:, topk - 1] - ordered[:, topk])[tile_of]]))
    return tuple(torch.from_numpy(np.stack(each)) for each in (bits, absent, gaps))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_its_definition(case):
    mask = alone(case)
    grid, position = mask.grid, position_in_order(mask.grid, 0)
    q_block, k_block = (torch.from_numpy(axis.block_of)[position] for axis in (grid.q_axis, grid.k_axis))
    bits, absent, gap = written_out(case)
    different = (mask.bits[:, q_block][:, :, k_block] != bits).any(dim=-1)
    assert not (different & (gap > 1e-6)).any()
    assert different.double().mean() < 0.01
    assert mask.density < 0.9
    if not case.source.absent_keys or not absent.any():
        assert mask.absent is None
    else:
        slots = mask.absent.exp().round().long()[:, q_block]
        assert torch.equal(slots[~different], absent[~different])


def test_kernels_without_a_log_sum_exp_and_unions_are_rejected():
    with pytest.raises(UserError, match="kernel 'sparge' does not support this plan: it returns no log-sum-exp"):
        DbspConfig.load({"mask": "ssta:block_k=64", "kernel": "sparge"})
    DbspConfig.load({"mask": "ssta:padding=none,block_k=64", "kernel": "sparge"})
    union = DbspConfig.load("ssta+window:tile=[6,8,8],whole_tiles=true,block_q=128,block_k=128").mask
    q = torch.randn(1, 1, 5 * 9 * 9, 8)
    with pytest.raises(UserError, match="masks with absent keys cannot be joined; set padding: none"):
        union.mask(MaskRequest(0, 1, (5, 9, 9)), LocalQK.alone(q, q))
    parts = (replace(union.of[0], padding="none"), union.of[1])
    assert replace(union, of=parts).mask(MaskRequest(0, 1, (5, 9, 9)), LocalQK.alone(q, q)).absent is None
