"""Cube attention: its counts, tiles and shares by step written out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from dbsp_core.sources import CubeSource, LocalQK, MaskRequest
from tests.core.sources.predicted.sparge_cases import SpargeCase, alone
from tests.core.sources.predicted.test_vsa import BLOCKS, VsaCase, tiles

CubeCase = partial(VsaCase, kind=CubeSource)
CASES = {
    "tiles that divide the video": CubeCase(thw=(4, 6, 8), settings={"topk": 0.3, **BLOCKS}),
    "smaller tiles at the far sides": CubeCase(thw=(5, 7, 9), settings={"topk": 0.1, **BLOCKS}),
    "text, batch of two": CubeCase(thw=(3, 7, 6), text_tokens=30, batch=2, settings={"topk": 0.25, **BLOCKS}),
    "text of three kinds": CubeCase(
        thw=(5, 7, 6), text_tokens=30, text_runs=(5, 2, 23), settings={"topk": 0.4, **BLOCKS}
    ),
}


def written_out(case: SpargeCase) -> torch.Tensor:
    """Returns bool[B · H, nq, nk]."""
    q, k = (tokens.double().flatten(0, 1) for tokens in case.tensors())
    means = [torch.stack([tokens[:, tile].mean(dim=1) for tile in tiles(case)], dim=1) for tokens in (q, k)]
    scores = means[0] @ means[1].mT * case.head_dim**-0.5
    text = sum(-(-run // 24) for run in case.text_runs or (case.text_tokens,))
    count = max(1, int(np.float32(scores.shape[-1] - text) * np.float32(case.settings["topk"])))
    bits = torch.eye(scores.shape[-1], dtype=torch.bool).repeat(len(scores), 1, 1)
    bits.scatter_(-1, text + scores[:, :, text:].topk(count).indices, True)
    bits[:, :text], bits[:, :, :text] = True, True
    return bits


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_its_definition(case):
    mask = alone(case)
    assert torch.equal(mask.bits, written_out(case))
    assert len(set(mask.counts.rows[:, -1].tolist())) <= 2


@pytest.mark.parametrize(
    ("tiles", "topk", "count"),
    [(8, 0.25, 2), (11, 0.1, 1), (45, 0.2, 9), (100, 0.29, 29), (900, 0.13, 116), (3, 0.1, 1)],
)
def test_counts_are_those_of_float32(tiles, topk, count):
    source = CubeSource(1, 1, tile=(1, 1, 1), topk=topk)
    keys = torch.arange(tiles, 0, -1.0)[None, None, :, None] / tiles  # the first are largest, and the last is its own
    bits = source.mask(MaskRequest(0, 1, (tiles, 1, 1)), LocalQK.alone(torch.ones_like(keys), keys)).bits
    assert bits[0, -1].nonzero().flatten().tolist() == [*range(count), tiles - 1]


def test_shares_are_those_of_the_step():
    case = CASES["tiles that divide the video"]
    by_step = replace(case, settings={**case.settings, "topk": (1.0, 0.5, 0.1)}).source
    tokens = LocalQK.alone(*case.tensors())
    counts = [by_step.mask(replace(case.request, step=step), tokens).counts.rows.min() for step in range(4)]
    assert counts == [8, 4, 1, 1]
