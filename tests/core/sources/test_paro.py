"""Mask source paro: the step's group, the head's token order, in parallel as in one process; errors on all ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, MaskFile, save_mask
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.sources import FileSource, MaskRequest, ParoSource
from dbsp_core.utils.errors import UserError
from tests.support.generators import random_bits
from tests.support.paro_cases import alone, run_bad_file, run_paro_case
from tests.support.workers import WorkerError

THW, HEADS, LAYERS = (3, 5, 7), 6, 2
TOLERANCE = 1e-5
GRID = BlockGrid(105, 0, 8, 8, THW)


def file_masks(groups: int, grid: BlockGrid = GRID, seed: int = 0, ordered: bool = True) -> list[list[BlockMask]]:
    """Returns masks with other bits and orders in every group, layer and head."""
    masks = []
    for group in range(groups):
        layers = []
        for layer in range(LAYERS):
            orders = np.roll(AXIS_ORDERS, group + 2 * layer).tolist() if ordered else ["thw"]
            bits = random_bits(HEADS, grid, 100 * seed + 10 * group + layer)
            layers.append(BlockMask(bits, replace(grid, orders=tuple(orders))))
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


class TestOneRank:
    def test_steps_after_dense_ones_have_the_masks_and_orders_of_their_group(self, path):
        source, masks = ParoSource(str(path)), file_masks(2)
        assert source.mask(request()).bits.all()
        for group, layers in enumerate(masks):
            for layer, mask in enumerate(layers):
                read = source.mask(request(step=group + 1, layer=layer))
                assert torch.equal(read.bits, mask.bits)
                assert read.grid == mask.grid
        assert len(set(source.mask(request(step=1)).grid.orders)) == 6

    def test_dense_steps_override_the_files(self, path):
        def densities(dense_steps):
            source = ParoSource(str(path), dense_steps)
            return [source.mask(request(step=step)).density for step in range(3)]

        first, second = (masks[0].density for masks in file_masks(2))
        assert densities(None) == [1, first, second]
        assert densities(0) == [first, first, second]
        assert densities(2) == [1, 1, second]
        assert densities(9) == [1, 1, 1]

    def test_file_without_groups_covers_every_step(self, tmp_path):
        save_mask(tmp_path / "m.safetensors", file_masks(1)[0])
        source = ParoSource(str(tmp_path / "m.safetensors"), dense_steps=1)
        assert source.mask(request()).bits.all()
        assert torch.equal(source.mask(request(step=70, layer=1)).bits, file_masks(1)[0][1].bits)

    def test_text_rows_and_columns_are_dense(self, tmp_path):
        grid = BlockGrid(112, 7, 8, 4, THW)
        save_mask(tmp_path / "m.safetensors", [BlockMask(np.zeros((HEADS, grid.nq, grid.nk), bool), grid)] * 2)
        bits = ParoSource(str(tmp_path / "m.safetensors")).mask(request(text_tokens=7)).bits
        expected = torch.zeros_like(bits)
        expected[:, :1] = expected[:, :, :2] = True
        assert torch.equal(bits, expected)

    def test_grid_of_every_layer_and_step_is_the_same(self, path):
        grids = {ParoSource(str(path)).grid(request(layer=layer, step=step)) for layer in (0, 1) for step in (0, 2)}
        assert grids == {GRID}

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"heads": 12}, "is for 6 heads and 105 tokens"),
            ({"thw": (3, 5, 8)}, "the model runs 6 heads and 120 tokens"),
            ({"thw": (5, 3, 7)}, r"is for a token grid of \(3, 5, 7\), the video's is \(5, 3, 7\)"),
            ({"layers": 40}, "is for 2 layers, the model has 40"),
            ({"step": 3}, r"has masks for steps 1 to 2 \(groups 1-1,2-2\), none for step 3; run fewer steps"),
        ],
    )
    def test_file_for_another_model_or_too_few_steps_raises(self, path, changes, message):
        source = ParoSource(str(path))
        source.cache_key(request(**changes))  # leaves the message to `mask`, which all ranks call together
        with pytest.raises(ValueError, match=message) as raised:
            source.mask(request(**changes))
        assert str(path) in str(raised.value)


DENSE = {"source": "dense", "block_q": 8, "block_k": 8}


@pytest.fixture(scope="module")
def references(path, tmp_path_factory):
    """Returns one process's outputs with the masks of `path`, dense, and with these bits in no order."""
    ignored = tmp_path_factory.mktemp("paro") / "ignored.safetensors"
    save_mask(ignored, file_masks(2, ordered=False), groups="1-1,2-2")
    masks = ({"source": "paro", "path": str(path)}, DENSE, {"source": "paro", "path": str(ignored)})
    return [alone("wan", THW, 7, mask) for mask in masks]


@pytest.mark.parametrize(
    ("world", "strategy", "planner"),
    [(2, "U2R1", "dbsp"), (2, "U1R2", "contiguous"), (4, "U2R2", "dbsp")],
)
@pytest.mark.usefixtures("debug")
def test_orders_of_heads_give_the_output_of_one_process(pool, path, references, world, strategy, planner):
    """Covers a contiguous layout and a striped one."""
    config = {"mask": {"source": "paro", "path": str(path)}, "strategy": strategy, "planner": planner}
    for same, dense, unordered in pool(world).run(run_paro_case, "wan", THW, 7, config, references):
        assert max(same) <= TOLERANCE
        assert max(dense[:2]) <= TOLERANCE, "the leading step is dense"
        assert min(dense[2:]) > 100 * TOLERANCE, "the mask must matter"
        assert max(unordered[:2]) <= TOLERANCE
        assert min(unordered[2:]) > 100 * TOLERANCE, "the orders must matter"


@pytest.mark.usefixtures("debug")
def test_orders_with_text_give_the_output_of_one_process(pool, tmp_path):
    grid = BlockGrid(112, 7, 8, 4, THW)
    paths = [tmp_path / f"{name}.safetensors" for name in ("ordered", "ignored")]
    for each, ordered in zip(paths, (True, False), strict=True):
        save_mask(each, file_masks(2, grid, ordered=ordered), groups="1-1,2-")
    mask, wrong = ({"source": "paro", "path": str(each), "dense_steps": 0} for each in paths)
    config = {"mask": mask, "strategy": "U1R3"}
    expected = [alone("cogvideox", THW, 7, one) for one in (mask, DENSE, wrong)]
    for same, dense, unordered in pool(3).run(run_paro_case, "cogvideox", THW, 7, config, expected):
        assert max(same) <= TOLERANCE
        assert min(dense) > 100 * TOLERANCE
        assert min(unordered) > 100 * TOLERANCE


DIFFERS = "the mask of layer 0 differs on rank(s) [1]; it must be the same on every rank"


@pytest.mark.parametrize(
    ("seed", "groups", "kept", "message"),
    [
        (0, "0-0,1-1", None, "differs on rank(s) [1]"),  # its step 0 is not dense
        (1, "1-1,2-2", None, DIFFERS),
        (0, "1-1,2-2", -9, "not a readable safetensors file"),
    ],
    ids=["other groups", "other masks", "truncated"],
)
def test_bad_file_on_one_rank_raises_on_every_rank(pool, path, tmp_path, seed, groups, kept, message):
    bad = tmp_path / "bad.safetensors"
    save_mask(bad, file_masks(2, seed=seed), groups=groups)
    bad.write_bytes(bad.read_bytes()[:kept])
    with pytest.raises(WorkerError) as caught:
        pool(3).run(run_bad_file, str(path), str(bad), 1, {"source": "paro"})
    assert [rank for rank, _, _ in caught.value.errors] == [0, 1, 2]
    for _, error, text in caught.value.errors:
        assert (error, "\n" in text) == ("UserError", False)
        assert message in text
    assert pool(3).run(run_bad_file, str(path), None, None, {"source": "paro"}) == [None] * 3  # still in step


def test_file_with_groups_is_rejected_by_source_file(path):
    with pytest.raises(UserError, match="read it with mask source 'paro'"):
        FileSource(str(path)).grid(request())


@pytest.mark.usefixtures("debug")
def test_source_file_with_packed_bits_and_orders_gives_the_output_of_one_process(pool, tmp_path):
    path, ignored = tmp_path / "packed.safetensors", tmp_path / "ignored.safetensors"
    save_mask(path, file_masks(1)[0], packed=True)
    save_mask(ignored, file_masks(1, ordered=False)[0])
    assert MaskFile(path).packed
    mask, wrong = ({"source": "file", "path": str(each)} for each in (path, ignored))
    config = {"mask": mask, "strategy": "U1R3"}
    expected = [alone("wan", THW, 7, one) for one in (mask, wrong)]
    for same, unordered in pool(3).run(run_paro_case, "wan", THW, 7, config, expected):
        assert max(same) <= TOLERANCE
        assert min(unordered) > 100 * TOLERANCE
