"""Dense heads go to a dense kernel, the rest to the block kernel, in one call; the answer is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask
from dbsp_core.runtime.tables import dense_spans_of
from tests.core.runtime.tables.dense_part_cases import gradients_too, run_dense_parts
from tests.support.attention_cases import Case

SHAPES = (
    Case("-", heads=4, tokens=203, batch=2),
    Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, layout="striped", padded=True),
    Case("-", heads=6, tokens=19 + 5 * 4 * 9, text_tokens=19, thw=(5, 4, 9), block_q=32,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (2, "U2R1"), (3, "U1R3"), (4, "U2R2"), (4, "U4R1")])
def test_dense_heads_on_the_dense_kernel(pool, world, strategy):
    for shape in SHAPES:
        for heads in ((0, 3), range(shape.heads)):
            found = pool(world).run(run_dense_parts, replace(shape, strategy=strategy), tuple(heads), False)
            assert all(error <= 1e-5 for error, *_ in found), (shape, heads)
            assert sum(parts for _, parts, _ in found) >= len(heads)
            whole = len(heads) == shape.heads
            assert (sum(blocks for *_, blocks in found) == 0) == whole, "the block kernel is called where it must"


def test_a_part_that_forgets_a_block_is_found(pool):
    found = pool(2).run(run_dense_parts, replace(SHAPES[0], strategy="U1R2"), (0, 1, 2, 3), True)
    assert max(error for error, *_ in found) > 1e-3


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (3, "U1R3")])
def test_gradients_of_dense_heads(pool, world, strategy):
    assert max(pool(world).run(gradients_too, replace(SHAPES[0], strategy=strategy))) <= 1e-5


def test_no_device_is_waited_for():
    """Where bits are on a device, which heads are dense is not asked; a CPU has no other kernel for them."""
    mask = BlockMask.dense(3, BlockGrid.uniform(64, 16))
    assert dense_spans_of(mask, torch.device("cpu")) is None
    assert dense_spans_of(mask, torch.device("cuda")).tolist() == [True] * 3
    elsewhere = BlockMask(mask.bits.to("meta"), mask.grid)
    assert dense_spans_of(elsewhere, torch.device("cuda")) is None
