"""Mask files: round trips of every form, and files that are rejected in one line."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dbsp_core import BlockGrid, BlockMask, MaskFile, save_mask
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.masks.mask_file import mask_bits, mask_values
from dbsp_core.masks.steps import StepGroups
from dbsp_core.utils.errors import UserError
from tests.support.generators import SEEDS, examples, random_bits

THW = (2, 3, 5)
GRID = BlockGrid(37, 7, 4, 3, THW)
ORDERS = st.sampled_from([*AXIS_ORDERS, "tile:2x2x2"])
METADATA = {"tokens": "37", "text_tokens": "7", "block_q": "4", "block_k": "3", "thw": "2,3,5"}


def a_mask(seed: int = 1, heads: int = 3) -> BlockMask:
    return BlockMask(random_bits(heads, GRID, seed), GRID)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "masks.safetensors"


def write(path, metadata=None, **tensors):
    """Writes a file as `save_mask` would, with other metadata (None removes a key) or other tensors."""
    given = {k: v for k, v in (METADATA | (metadata or {})).items() if v is not None}
    save_file(tensors or {"mask": ones(2)}, path, metadata=given or None)


def ones(*leading, nq=GRID.nq, nk=GRID.nk):
    return torch.ones(*leading, nq, nk, dtype=torch.uint8)


def truncate(path):
    save_mask(path, a_mask())
    path.write_bytes(path.read_bytes()[:-20])


ORDER_INDEX = torch.tensor([0, 2], dtype=torch.uint8)
BAD_FORMS = {
    "without the tensor": ({"bits": ones(2)}, {}, r"needs one tensor, 'mask' or 'packed', got \['bits'\]"),
    "without metadata": ({}, dict.fromkeys(METADATA), "lacks metadata tokens, text_tokens, block_q, block_k"),
    "absurd numbers": ({}, {"tokens": str(10**15), "thw": None}, "makes 250000000000001×"),
    "groups, four dimensions": ({"mask": ones(1, 2)}, {"groups": "0-9"}, "expected uint8 .* of shape .groups"),
    "groups with a gap": ({"mask": ones(2, 1, 2)}, {"groups": "0-4,6-9"}, "bad metadata.*must start at step 5"),
    "several orders, no index": ({}, {"orders": "thw,hwt"}, "tensor 'orders' must be"),
    "an order index too large": ({"mask": ones(2), "orders": ORDER_INDEX}, {"orders": "thw,hwt"}, "'orders' must be"),
    "countless orders": (
        {"mask": ones(2), "orders": ORDER_INDEX}, {"orders": ",".join(["thw"] * 100_000)}, "bad token orders"
    ),
}  # fmt: skip
BAD_FILES = {
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read .*symbolic link"),
    "truncated": (truncate, "not a readable safetensors file"),
    "not safetensors": (
        lambda path: torch.save({"mask": torch.ones(1)}, path),
        "another project.s masks .*dbsp masks convert IN OUT",
    ),
    **{
        name: (functools.partial(write, metadata=metadata, **tensors), message)
        for name, (tensors, metadata, message) in BAD_FORMS.items()
    },
}


@pytest.mark.parametrize(("make", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_file_raises_one_line_with_its_name(path, make, message):
    make(path)
    with pytest.raises(UserError, match=message) as raised:
        MaskFile(path)
    assert str(path) in str(raised.value)
    assert len(str(raised.value)) < 1000


def test_values_other_than_0_and_1_raise(path):
    tensor = ones(2)
    tensor[1, 2, 3] = 2
    write(path, mask=tensor)
    with pytest.raises(ValueError, match="must be 0 or 1, got 2") as raised:
        MaskFile(path).layer(0)
    assert str(path) in str(raised.value)


@st.composite
def files(draw):
    """Draws (masks as `save_mask` takes them, groups, packed): every form that a file can have."""
    heads, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    groups = draw(st.sampled_from([None, "0-3,4-9", "5-9,10-", "7-7"]))
    form = draw(st.sampled_from(["canonical", "one", "heads", "layers"]))

    def mask(seed):
        orders = {
            "canonical": ("thw",),
            "one": ("hwt",),
            "heads": tuple(AXIS_ORDERS[i] for i in range(heads)),
            "layers": tuple(draw(st.lists(ORDERS, min_size=heads, max_size=heads))),
        }[form]
        grid = replace(GRID, orders=orders if len(set(orders)) > 1 else orders[:1])
        return BlockMask(random_bits(heads, GRID, seed), grid)

    seed = draw(SEEDS) % 1000
    if groups is None:
        masks = [mask(seed + i) for i in range(layers)]
        return (masks[0] if draw(st.booleans()) else masks), None, draw(st.booleans())
    count = len(StepGroups.parse(groups))
    return [[mask(seed + 9 * g + i) for i in range(layers)] for g in range(count)], groups, draw(st.booleans())


@given(files())
@examples(60)
def test_saved_masks_are_read_back_equal(tmp_path_factory, problem):
    masks, groups, packed = problem
    path = tmp_path_factory.mktemp("file") / "masks.safetensors"
    save_mask(path, masks, groups=groups, packed=packed)
    file = MaskFile(path)
    assert (file.packed, str(file.groups or None)) == (packed, str(groups))
    assert file.grid == GRID
    by_group = masks if groups else [masks if isinstance(masks, list) else [masks]]
    assert file.per_layer == isinstance(masks, list)
    for group, layers in enumerate(by_group):
        assert file.layers == len(layers)
        for layer, mask in enumerate(layers):
            read = file.layer(layer, group)
            assert torch.equal(read.bits, mask.bits)
            assert read.grid == mask.grid


@given(SEEDS, st.integers(1, 40))
@examples(30)
def test_bits_are_packed_from_the_most_significant_one(seed, nk):
    bits = torch.from_numpy(np.random.default_rng(seed).random((2, 3, nk)) < 0.5)
    packed = mask_values(bits, packed=True)
    assert packed.shape == (2, 3, -(-nk // 8))
    assert torch.equal(mask_bits(packed, nk, packed=True), bits)
    for head, row, block in np.ndindex(2, 3, nk):
        assert bool(packed[head, row, block // 8] >> (7 - block % 8) & 1) == bool(bits[head, row, block])


def test_what_a_file_has_no_place_for_is_rejected(path):
    mask = a_mask()
    with pytest.raises(UserError, match="a mask file cannot store a mask's absent keys; save"):
        save_mask(path, replace(mask, absent=torch.zeros(mask.heads, mask.grid.nq)))
    assert not path.exists()


def test_step_is_found_in_its_group():
    groups = StepGroups.parse("5-9, 10-24,25-49")
    assert str(groups) == "5-9,10-24,25-49"
    assert [groups.find(step) for step in (0, 4, 5, 9, 10, 24, 25, 49)] == [None, None, 0, 0, 1, 1, 2, 2]
    with pytest.raises(ValueError, match="none for step 50"):
        groups.find(50)
    assert StepGroups.parse("3-4,5-").find(10**6) == 1
    assert StepGroups.parse("0").find(0) == StepGroups.parse("0-").find(99) == 0
    for text in ("", "a", "5-3", "0-3,5-9", "0-,4-", "0-3,3-5", "1-2,", "-1", "0-3;4-5"):
        with pytest.raises(ValueError, match="step groups"):
            StepGroups.parse(text)
