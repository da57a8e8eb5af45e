"""SubBlock: its counts, and its scores written out."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from dbsp_core.masks.grid import BlockAxis
from dbsp_core.sources import SubBlockSource, head_shares
from dbsp_core.sources.base import kept_blocks
from tests.core.sources.predicted.sparge_cases import SpargeCase, alone
from tests.support.oracle import position_in_order

SubBlockCase = partial(SpargeCase, kind=SubBlockSource)
CASES = {
    "short last cells": SubBlockCase(settings={"sparsity": 0.6, "multiple": 2}),
    "text, batch of two": SubBlockCase(text_tokens=37, batch=2, thw=(4, 5, 11), settings={"multiple": 3}),
    "unequal cells": SubBlockCase(
        settings={"cells_q": 2, "cells_k": 8, "multiple": 1, "sparsity": 0.8, "dense_text": False}, text_tokens=5
    ),
    "columns of text": SubBlockCase(
        settings={"dense_text": "columns", "sparsity": 0.7, "multiple": 4}, text_tokens=50
    ),
    "bfloat16": SubBlockCase(dtype=torch.bfloat16, settings={"sparsity": 0.5, "block_q": 16}),
    "tiles": SubBlockCase(settings={"multiple": 1, "token_order": "tile:2x4x4"}, thw=(4, 8, 9), heads=2),
}


def cells_of(tokens: torch.Tensor, axis: BlockAxis, cells: int) -> list[torch.Tensor]:
    """Returns of each block the means of its cells that have tokens, [cells, D], from one head's [N, D]."""
    return [
        torch.stack([part.mean(dim=0) for part in block.split(axis.block // cells)])
        for block in tokens.split(axis.lengths.tolist())
    ]


def written_out(case: SpargeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns bool[B · H, nq, nk], and how far a row's last block that is kept is from the next one, [B · H, nq]."""
    source, grid = case.source, case.source.grid(case.request)
    order = position_in_order(grid, 0).argsort()
    scores = torch.empty(case.batch * case.heads, grid.nq, grid.nk, dtype=torch.float64)
    for head, both in enumerate(zip(*map(torch.from_numpy, case.by_head()), strict=True)):
        q, k = (tokens[order] for tokens in both)
        keys = cells_of(k, grid.k_axis, source.cells_k)
        for i, queries in enumerate(cells_of(q, grid.q_axis, source.cells_q)):
            for j, cells in enumerate(keys):
                scores[head, i, j] = (queries @ cells.T * case.head_dim**-0.5).flatten().logsumexp(0)
    count = math.ceil(math.ceil((1 - source.sparsity) * grid.nk) / source.multiple) * source.multiple
    ordered = scores.sort(dim=-1, descending=True)
    bits = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, ordered.indices[..., : min(count, grid.nk)], True)
    if source.dense_text == "rows":
        bits[:, grid.q_axis.starts < grid.text_tokens] = True
    if source.dense_text == "columns":
        bits[:, :, grid.k_axis.starts < grid.text_tokens] = True
    gap = ordered.values[..., count - 1] - ordered.values[..., count]
    return bits, gap


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("pairs", [1 << 20, 300], ids=["whole", "in parts"])
def test_mask_equals_the_definition_written_out(case, pairs, monkeypatch):
    monkeypatch.setitem(head_shares.PAIRS_AT_ONCE, "cpu", pairs)
    expected, gap = written_out(case)
    mask = alone(case)
    different = (mask.bits != expected).any(dim=-1)
    assert not (different & (gap > 1e-5)).any()  # pooled numbers are rounded to 22 bits
    assert different.double().mean() < 0.01
    assert 0.1 < mask.density < 0.9


@pytest.mark.parametrize(
    ("sparsity", "blocks", "multiple", "count"),
    [
        (0.75, 590, 8, 152),
        (0.8, 590, 8, 120),
        (0.85, 590, 8, 96),
        (0.75, 64, 8, 16),
        (0.75, 295, 1, 74),
        (0.9, 5, 8, 5),
    ],
)
def test_counts_are_sglangs(sparsity, blocks, multiple, count):
    assert kept_blocks((1 - sparsity) * blocks, blocks, round_up=True, multiple=multiple) == count
