"""Choosing blocks: the Triton kernels, in the interpreter or on a GPU, next to torch's own operations, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dbsp_kernels.prediction import pooled_scores, select_blocks
from tests.support.interpreter import interpreted

pytest.importorskip("triton")
from dbsp_kernels.triton.prediction import pooled_scores_triton, select_blocks_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("limit", [(0.5, 0), (0.93, 0), (0.125, 0), (1e-9, 0), (None, 1), (None, 4), (None, 100)])
def test_triton_selection_equals_sorting(limit):
    nk = {1: 16, 100: 1}.get(limit[1], 37)
    generator = torch.Generator().manual_seed(nk)
    chance = torch.softmax(3 * torch.randn(2, 3, nk, generator=generator, dtype=torch.float64), dim=-1)
    chance[0, 1], chance[0, 2] = torch.nan, 0.0
    # Many ties, of which some fit: sixteenths, which any order adds up exactly.
    chance[1] = torch.randint(0, 3, (3, nk), generator=generator) / 16
    dense = torch.rand(2, 3 + nk, generator=generator) < 0.1
    for crossing in (False, True):
        with interpreted():
            found = select_blocks_triton(chance.to(DEVICE), dense.to(DEVICE), *limit, crossing)
        assert torch.equal(found.cpu(), select_blocks(chance, dense, *limit, crossing))


def test_selection_accepts_expanded_masks_and_views():
    generator = torch.Generator().manual_seed(5)
    chance = torch.rand(7, 3, 2 * 19, generator=generator, dtype=torch.float64)[..., ::2].to(DEVICE)
    dense = (torch.rand(3 + 19, generator=generator) < 0.2).to(DEVICE).expand(7, -1)
    with interpreted():
        found = select_blocks_triton(chance, dense, None, 4)
    assert torch.equal(found.cpu(), select_blocks(chance.cpu(), dense.cpu(), None, 4))


@pytest.mark.parametrize(("nq", "nk", "width"), [(3, 40, 8), (33, 2, 5), (40, 33, 128)])
def test_triton_scores_equal_torchs(nq, nk, width):
    rows = pooled(nq + nk, width)
    rows[:, nq, -1], rows[:, nq + 1, -1] = 0.25, 0.5
    with interpreted():
        found = pooled_scores_triton(rows.to(DEVICE), nq, 0.3, 0.25)
    assert torch.equal(found.cpu(), pooled_scores(rows, nq, 0.3, 0.25))
    assert found.isinf().any()
    assert not found.isinf().all()


def test_scores_depend_on_no_order_of_summation():
    rows, shuffled = pooled(50, 64), torch.randperm(64, generator=torch.Generator().manual_seed(1))
    other = torch.cat([rows[..., shuffled], rows[..., -1:]], dim=-1)
    assert torch.equal(pooled_scores(rows, 20, 0.125, -2.0), pooled_scores(other, 20, 0.125, -2.0))
    wide = rows[..., :-1].double()
    products = (wide[:, :20, None] * wide[:, None, 20:]).unbind(-1)
    assert not torch.equal(sum(products), sum(products[::-1]))  # as float64 sums of what is not rounded do


def test_scores_are_those_of_the_means_but_for_rounding():
    rows = pooled(300, 128, least=-30)[1:]
    scores, wide = pooled_scores(rows, 100, 1.0, -2.0), rows[..., :-1].double()
    norms = wide.norm(dim=-1)
    error = (scores - wide[:, :100] @ wide[:, 100:].mT).abs() / (norms[:, :100, None] * norms[:, None, 100:])
    assert 0 < error.max() <= 2.0**-18


def pooled(blocks: int, width: int, least: int = -44) -> torch.Tensor:
    """Returns float32[2, blocks, width + 1], rows of sizes from 10^least to 10^4, one of them 0."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, blocks, width + 1, generator=generator) * torch.logspace(least, 4, blocks)[:, None]
    rows[0, 1], rows[..., -1] = 0.0, 1.0
    return rows
