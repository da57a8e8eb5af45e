"""Mask source paro: the step's group, the head's token order, and files for something else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.sources import MaskRequest, ParoSource
from tests.support.generators import random_bits

THW, HEADS, LAYERS = (3, 5, 7), 6, 2
GRID = BlockGrid(105, 0, 8, 8, THW)


def file_masks(groups: int, seed: int = 0) -> list[list[BlockMask]]:
    """Returns masks with other bits and orders in every group, layer and head."""
    masks = []
    for group in range(groups):
        layers = []
        for layer in range(LAYERS):
            orders = np.roll(AXIS_ORDERS, group + 2 * layer).tolist()
            bits = random_bits(HEADS, GRID, 100 * seed + 10 * group + layer)
            layers.append(BlockMask(bits, replace(GRID, orders=tuple(orders))))
        masks.append(layers)
    return masks


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Returns the path of a file in which step 0 is dense, and steps 1 and 2 are groups."""
    path = tmp_path_factory.mktemp("paro") / "masks.safetensors"
    save_mask(path, file_masks(2), groups="1-1,2-2", packed=True)
    return path


def request(**changes):
    return replace(MaskRequest(0, HEADS, THW, layers=LAYERS), **changes)


def test_steps_after_dense_ones_have_the_masks_and_orders_of_their_group(path):
    source, masks = ParoSource(str(path)), file_masks(2)
    assert source.mask(request()).bits.all()
    for group, layers in enumerate(masks):
        for layer, mask in enumerate(layers):
            read = source.mask(request(step=group + 1, layer=layer))
            assert torch.equal(read.bits, mask.bits)
            assert read.grid == mask.grid
    assert len(set(source.mask(request(step=1)).grid.orders)) == 6


def test_dense_steps_override_the_files(path):
    def densities(dense_steps):
        source = ParoSource(str(path), dense_steps)
        return [source.mask(request(step=step)).density for step in range(3)]

    first, second = (masks[0].density for masks in file_masks(2))
    assert densities(None) == [1, first, second]
    assert densities(0) == [first, first, second]
    assert densities(2) == [1, 1, second]
    assert densities(9) == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thw": (5, 3, 7)}, r"is for a token grid of \(3, 5, 7\), the video's is \(5, 3, 7\)"),
        ({"layers": 40}, "is for 2 layers, the model has 40"),
        ({"step": 3}, r"has masks for steps 1 to 2 \(groups 1-1,2-2\), none for step 3; run fewer steps"),
    ],
)
def test_file_for_another_model_or_too_few_steps_raises(path, changes, message):
    source = ParoSource(str(path))
    source.cache_key(request(**changes))  # leaves the message to `mask`, which all ranks call together
    with pytest.raises(ValueError, match=message) as raised:
        source.mask(request(**changes))
    assert str(path) in str(raised.value)
