"""Block masks on a grid."""

from __future__ import annotations

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask

GRID = BlockGrid(tokens=10, text_tokens=0, block_q=4, block_k=5)  # 3 × 2 blocks


@pytest.mark.parametrize("shape", [(2, 2, 3), (3, 2), (1, 2, 3, 2), (0, 3, 2)])
def test_a_shape_that_does_not_fit_raises_with_the_one_expected(shape):
    with pytest.raises(ValueError, match=r"does not fit 10 tokens in blocks of 4×5: expected \[heads, 3, 2\]"):
        BlockMask(torch.ones(shape, dtype=torch.bool), GRID)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_bits_that_are_not_bool_raise(dtype):
    with pytest.raises(ValueError, match="must be bool"):
        BlockMask(torch.ones(2, 3, 2, dtype=dtype), GRID)
