"""Packed grids and masks: what planners, tables, files and pictures are given of several sequences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, save_mask
from dbsp_core.masks.block_mask import row_positions
from dbsp_core.sources import DenseSource, LocalQK, MaskRequest, SpargeSource, WindowSource, packed_mask
from dbsp_core.utils.errors import UserError
from tests.support.generators import SEEDS, RandomSource, examples, masks
from tests.support.oracle import dense_attention, largest_difference
from tests.support.repository import ROOT

SIZES = ((4, 5, 6, 9), (1, 7, 3, 0), (3, 3, 8, 17))
"""Frames, rows, columns, text."""


def packed_sequences(heads: int = 3, blocks: tuple[int, int] = (16, 8)) -> list[BlockMask]:
    return [
        RandomSource(*blocks, seed=index).mask(MaskRequest(0, heads, (t, h, w), text))
        for index, (t, h, w, text) in enumerate(SIZES)
    ]


@given(mask=masks(sequences=4), seed=SEEDS)
@examples(40)
def test_counts_are_those_of_the_block_diagonal(mask, seed):
    square = mask.square().numpy()
    assert np.array_equal(mask.counts.rows, square.sum(axis=2))
    assert mask.density == square.sum() / (mask.heads * mask.grid.pairs)
    assert mask.bits.numel() == mask.heads * sum(grid.nq * grid.nk for grid in mask.grid.sequences)
    head, block = (np.random.default_rng(seed).integers(0, n, 5) for n in (mask.heads, mask.grid.nq))
    for index, one, row in zip(row_positions(mask.grid, mask.heads, head, block), head, block, strict=True):
        sequence = mask.grid.q_axis.sequence_of[row]
        own = slice(mask.grid.k_axis.bounds[sequence], mask.grid.k_axis.bounds[sequence + 1])
        width = own.stop - own.start
        bits = mask.row_bits[index : index + width] if mask.grid.packed_from else mask.row_bits[index]
        assert np.array_equal(bits.numpy(), square[one, row, own])


def test_mask_of_packed_sequences_is_not_saved(tmp_path):
    with pytest.raises(
        UserError, match=r"a mask file holds one sequence, got a packed mask; save each of `mask\.parts`"
    ):
        save_mask(tmp_path / "masks.safetensors", BlockMask.packed(packed_sequences()))


def test_each_sequence_asks_its_own_source():
    request = MaskRequest(3, 2, (1, 1, 1))
    grids = [BlockGrid(t * h * w + text, text, 1, 1, (t, h, w)) for t, h, w, text in SIZES]
    sources = [WindowSource(16, 8, window=(3, 3, 3)), DenseSource(16, 8), SpargeSource(16, 8, cdf=0.6)]
    pairs = list(zip(grids, sources, strict=True))
    q, k = torch.randn(2, 1, 2, sum(grid.tokens for grid in grids), 8)
    mask = packed_mask(pairs, request, LocalQK.alone(q, k))
    own = [replace(request, thw=grid.thw, text_tokens=grid.text_tokens) for grid in grids]
    assert torch.equal(mask.parts[0].bits, sources[0].mask(own[0]).bits)
    assert mask.parts[1].bits.all()
    last = slice(150, None)
    assert torch.equal(mask.parts[2].bits, sources[2].mask(own[2], LocalQK.alone(q[:, :, last], k[:, :, last])).bits)
    with pytest.raises(UserError, match="need queries and keys; pass tokens to packed_mask"):
        packed_mask(pairs, request)
    with pytest.raises(UserError, match="one sample with their 239 tokens"):
        packed_mask(pairs, request, LocalQK.alone(q[:, :, 1:], k[:, :, 1:]))


def test_sequences_that_cannot_be_packed():
    first, second, _ = packed_sequences()
    packed = BlockMask.packed([first, second])
    four_orders = BlockGrid(8, 0, 16, 8, (2, 2, 2), ("thw", "hwt", "wth", "thw"))
    other_blocks = BlockMask.dense(3, replace(second.grid, block_k=16))
    for message, make in {
        "at least one sequence's mask": lambda: BlockMask.packed([]),
        r"equal block sizes, got 16×8 and 16×16; set one block": lambda: BlockMask.packed([first, other_blocks]),
        "equal numbers of heads, got masks of 3 and 4": lambda: BlockMask.packed(
            [first, BlockMask.dense(4, BlockGrid(9, 0, 16, 8))]
        ),
        "token orders for 3 and 4": lambda: BlockGrid.packed([first.grid, four_orders]),
        r"give their masks to BlockMask\.packed": lambda: BlockMask(packed.square(), packed.grid),
    }.items():
        with pytest.raises(UserError, match=message):
            make()


def run_page(rank: int, world: int, code: str) -> tuple[float, bool]:
    """Runs the example of docs/packed-sequences.md. Returns its error, and whether it has gradients."""
    names: dict = {}
    exec(code, names)
    gathered, whole = names["here"].detach(), torch.empty(names["striped"].tokens, names["here"].shape[1])
    for other, held in enumerate(SequenceGroup.from_group().all_gather(gathered)):
        mine, slots = (torch.from_numpy(a) for a in names["striped"].tokens_at(other))
        whole[mine] = held[slots]
    qkv = whole.view(1, len(whole), 3, names["heads"], names["width"]).permute(2, 0, 3, 1, 4)
    parts = names["mask"].parts
    each = zip(qkv.split([part.grid.tokens for part in parts], dim=3), parts, strict=True)
    expected = torch.cat([dense_attention(*one, part, torch.arange(part.grid.tokens)) for one, part in each], dim=2)
    mine = torch.from_numpy(names["loaded"].tokens_at(rank)[0])
    error = largest_difference(names["out"], expected[:, :, mine])
    return error, bool(names["hidden"].grad.isfinite().all())


def test_example_of_the_page_runs_as_printed(pool):
    page = (ROOT / "docs" / "packed-sequences.md").read_text()
    code = "import torch\n" + page.partition("```python\nimport torch\n")[2].partition("```")[0]
    for error, has_gradients in pool(4).run(run_page, code):
        assert (error <= 1e-5, has_gradients) == (True, True)
