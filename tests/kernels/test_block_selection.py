"""Choosing blocks: the Triton kernels, in the interpreter or on a GPU, beside torch's own operations, bit for bit."""

from __future__ import annotations

import pytest
import torch

from dbsp_kernels.prediction.block_selection import pooled_scores_torch, select_blocks_torch
from interpreter import interpreted

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("nk", [1, 16, 37])
@pytest.mark.parametrize("limit", [(0.5, 0), (0.93, 0), (1e-9, 0), (None, 1), (None, 4), (None, 100)])
def test_the_kernel_chooses_what_sorting_does(nk, limit):
    from dbsp_kernels.triton.block_selection import select_blocks_triton

    generator = torch.Generator().manual_seed(nk)
    chance = torch.softmax(3 * torch.randn(2, 3, nk, generator=generator, dtype=torch.float64), dim=-1)
    chance[0, 1], chance[0, 2] = torch.nan, 0.0
    # Many ties, of which some fit: sixteenths, which any order adds up exactly.
    chance[1] = torch.randint(0, 3, (3, nk), generator=generator) / 16
    dense = torch.rand(2, 3 + nk, generator=generator) < 0.1
    with interpreted():
        found = select_blocks_triton(chance.to(DEVICE), dense.to(DEVICE), *limit)
    assert torch.equal(found.cpu(), select_blocks_torch(chance, dense, *limit))


@pytest.mark.parametrize(("nq", "nk", "width"), [(3, 40, 8), (33, 2, 5)])
def test_the_kernel_scores_what_products_do(nq, nk, width):
    from dbsp_kernels.triton.block_selection import pooled_scores_triton

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-64, 65, (2, nq + nk, width + 1), generator=generator) / 64  # products are exact in any order
    rows[:, nq, -1], rows[:, nq + 1, -1] = 0.25, 0.5
    with interpreted():
        found = pooled_scores_triton(rows.to(DEVICE), nq, 0.3, 0.25)
    assert torch.equal(found.cpu(), pooled_scores_torch(rows, nq, 0.3, 0.25))
    assert found.isinf().any()
    assert not found.isinf().all()
