"""The mask file format: what is written is read back, and what is no mask file is said to be none."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from dbsp_core import BlockGrid, BlockMask, MaskFile, save_mask
from dbsp_core.masks.block_mask import CoarseBranch
from tests.support.generators import random_bits

GRID = BlockGrid(tokens=203, text_tokens=11, block_q=32, block_k=16)
METADATA = {"tokens": "203", "text_tokens": "11", "block_q": "32", "block_k": "16"}


def a_mask(seed: int = 1, heads: int = 3) -> BlockMask:
    return BlockMask(random_bits(heads, GRID, seed), GRID)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "masks.safetensors"


class TestRoundTrip:
    def test_missing_folders_are_made(self, tmp_path):
        save_mask(tmp_path / "a" / "b" / "mask.safetensors", a_mask())
        assert MaskFile(tmp_path / "a" / "b" / "mask.safetensors").heads == 3


class TestSkippedBlocks:
    def test_a_file_that_says_it_has_no_pooled_keys_is_read(self, path):
        write(path, metadata={**METADATA, "pooled_keys": "false"})
        assert MaskFile(path).layer(0).bits.all()

    def test_a_coarse_branch_is_rejected(self, path):
        branch = CoarseBranch(*(torch.zeros(3, 1, 4),) * 2, torch.ones(1).bool(), torch.zeros(1, 3, 1, 4))
        with pytest.raises(ValueError, match="a coarse branch follows from values and gates"):
            save_mask(path, BlockMask(a_mask().bits, GRID, branch))


def write(path, tensor=None, metadata=METADATA, name="mask"):
    tensor = torch.ones(2, GRID.nq, GRID.nk, dtype=torch.uint8) if tensor is None else tensor
    save_file({name: tensor}, path, metadata=metadata)


def without(key):
    return {k: v for k, v in METADATA.items() if k != key}


def truncate(path):
    save_mask(path, a_mask())
    path.write_bytes(path.read_bytes()[:-20])


def truncate_header(path):
    save_mask(path, a_mask())
    path.write_bytes(path.read_bytes()[:30])


BAD_FILES = {
    "with pooled keys": (
        lambda path: write(path, metadata={**METADATA, "pooled_keys": "true"}),
        "pooled_keys is 'true', but pooled keys of skipped blocks were removed.*remove this key to use the bits alone",
    ),
    "missing": (lambda path: None, "does not exist"),
    "a folder": (lambda path: path.mkdir(), "is a folder, not a file; give the path of one"),
    "a pipe": (os.mkfifo, "is a pipe, not a file"),
    "a dangling link": (lambda path: path.symlink_to("elsewhere"), "is a link to elsewhere, which does not exist"),
    "a link to itself": (lambda path: path.symlink_to(path), "cannot be read .*symbolic link"),
    "with a number of 5,000 digits": (
        lambda path: write(path, metadata=METADATA | {"tokens": "1" * 5000}),
        r"tokens has '1+… \(5,002 char",
    ),
    "empty": (lambda path: path.write_bytes(b""), "not a readable safetensors file"),
    "truncated": (truncate, "not a readable safetensors file"),
    "truncated in its header": (truncate_header, "not a readable safetensors file"),
    "not safetensors": (
        lambda path: torch.save({"mask": torch.ones(1)}, path),
        "another project.s masks .*dbsp masks convert IN OUT",
    ),
    "without the tensor": (lambda path: write(path, name="bits"), r"has no tensor 'mask' \(it has \['bits'\]\)"),
    "of floats": (lambda path: write(path, torch.ones(2, GRID.nq, GRID.nk)), "is F32 of shape"),
    "of bools": (lambda path: write(path, torch.ones(2, GRID.nq, GRID.nk, dtype=torch.bool)), "is BOOL of shape"),
    "2-D": (lambda path: write(path, torch.ones(GRID.nq, GRID.nk, dtype=torch.uint8)), "expected uint8"),
    "without heads": (lambda path: write(path, torch.ones(0, GRID.nq, GRID.nk, dtype=torch.uint8)), "none of them 0"),
    "without layers": (lambda path: write(path, torch.ones(0, 2, GRID.nq, GRID.nk, dtype=torch.uint8)), "of them 0"),
    "without metadata": (lambda path: write(path, metadata=None), "lacks metadata tokens, text_tokens, block_q, blo"),
    **{f"without {key}": (lambda path, key=key: write(path, metadata=without(key)), key) for key in METADATA},
    "whose metadata is no number": (lambda path: write(path, metadata=METADATA | {"block_q": "big"}), "bad metadata"),
    "whose metadata makes no grid": (lambda path: write(path, metadata=METADATA | {"block_q": "0"}), "block_q=0"),
    "that does not fit its grid": (
        lambda path: write(path, metadata=METADATA | {"tokens": "300"}),
        "which makes 11×20 blocks",
    ),
}


@pytest.mark.parametrize(("make", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_raises_one_line_that_names_it(path, make, message):
    make(path)
    with pytest.raises(ValueError, match=message) as raised:
        MaskFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_values_other_than_0_and_1_raise(path):
    tensor = torch.zeros(2, GRID.nq, GRID.nk, dtype=torch.uint8)
    tensor[1, 2, 3] = 2
    write(path, tensor)
    with pytest.raises(ValueError, match="must be 0 or 1, found 2") as raised:
        MaskFile(path).layer(0)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_is_not_there_raises(path, layer):
    save_mask(path, [a_mask(1), a_mask(2)])
    with pytest.raises(ValueError, match=f"has 2 layers, there is no layer {layer}") as raised:
        MaskFile(path).layer(layer)
    assert str(path) in str(raised.value)


class TestSaving:
    def test_a_save_that_fails_leaves_the_earlier_file_and_nothing_else(self, path, monkeypatch):
        save_mask(path, a_mask(1))
        before = path.read_bytes()

        def fail(*args):
            raise OSError("disk full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            save_mask(path, a_mask(2))
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    def test_no_masks_raise(self, path):
        with pytest.raises(ValueError, match="at least one mask"):
            save_mask(path, [])

    @pytest.mark.parametrize("other", [a_mask(heads=4), BlockMask.dense(3, BlockGrid.uniform(64, 16))])
    def test_layers_of_different_shape_raise_and_write_nothing(self, path, other):
        with pytest.raises(ValueError, match="same grid and number of heads"):
            save_mask(path, [a_mask(), other])
        assert not path.exists()
