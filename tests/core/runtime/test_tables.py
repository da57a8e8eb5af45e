"""Kernel tables: bits in, the packed blocks of every row out; dense heads of a part are one call."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.runtime.tables import build_tables, dense_spans_of, table_layout, whole_head_tokens
from dbsp_kernels import DensePart
from dbsp_kernels.tables import expand_rows, pack_bits, pack_rows
from tests.support.generators import SEEDS, examples, masks
from tests.support.interpreter import interpreted

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_suite runs the kernels")


@st.composite
def bit_rows(draw: st.DrawFn) -> dict:
    """Draws rows of several heads in up to three chunks, whose packed blocks follow one another, some short."""
    rng = np.random.default_rng(draw(SEEDS))
    width, heads, chunks = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    per_head = rng.integers(0, width + 1, (chunks, heads))
    head = rng.integers(heads, size=draw(st.integers(0, 6)))
    needed = (rng.random((chunks, len(head), width)) < 0.6) & (np.arange(width) < per_head[:, head, None])
    base = (per_head.cumsum(1) - per_head).take(head, axis=1)
    lengths = [rng.integers(1, 3, count) for count in per_head.sum(1)]
    lists, counts = [], np.zeros(base.shape, dtype=np.int32)
    for chunk, length in enumerate(lengths):
        packed = base[chunk][:, None] + np.arange(width)
        blocks = [packed[row][needed[chunk][row]] for row in range(len(head))]
        counts[chunk] = [(length[of_row] == 2).sum() for of_row in blocks]
        lists.append([[*of_row[length[of_row] == 2], *of_row[length[of_row] == 1]] for of_row in blocks])
    bounds = np.cumsum([0, *map(len, lengths)])
    tables = (torch.from_numpy(table).int() for table in (base, np.concatenate(lengths), bounds, counts))
    return {"arguments": (pack_bits(torch.from_numpy(needed)), *tables, width, 2), "lists": lists}


def assert_lists(index: torch.Tensor, case: dict, batch: int) -> None:
    blocks = case["arguments"][3].diff().tolist()
    for of_chunk, lists, count in zip(index, case["lists"], blocks, strict=True):
        for copy, rows in enumerate(of_chunk.unflatten(0, (batch, len(lists)))):
            for row, wanted in zip(rows, lists, strict=True):
                assert row[: len(wanted)].tolist() == [entry + copy * count for entry in wanted]


@given(case=bit_rows(), batch=st.integers(1, 3))
@examples(60)
def test_table_lists_full_blocks_first(case, batch):
    index = expand_rows(*case["arguments"], batch=batch)
    assert (index.dtype, index.shape[1]) == (torch.int32, batch * len(case["lists"][0]))
    assert_lists(index, case, batch)


@without_gpu
@given(case=bit_rows(), batch=st.integers(1, 2))
@examples(15)
def test_triton_kernel_expands_rows_as_torch(case, batch):
    pytest.importorskip("triton")
    from dbsp_kernels.triton import tables as triton_rows

    for chunk in (16, 1024):
        with mock.patch.object(triton_rows, "CHUNK", chunk), interpreted():
            index = triton_rows.triton_expand_rows(*case["arguments"], batch)
        assert_lists(index, case, batch)


@without_gpu
@given(mask=masks(heads=3, least_key_blocks=3, more_tokens=30), data=st.data())
@examples(20)
def test_triton_kernel_packs_rows_as_torch(mask, data):
    pytest.importorskip("triton")
    from dbsp_kernels.triton import tables as triton_rows

    strategy = data.draw(st.sampled_from(["U1R1", "U2R1", "U3R1", "U2R2", "U1R3"]))
    layout = table_layout(make_plan(mask, strategy), 0)
    bits = mask.row_bits
    of_mask = layout.rows, layout.spans_of, layout.columns, layout.present, layout.full
    expected = pack_rows(bits, *of_mask)
    with mock.patch.object(triton_rows, "CHUNK", 16), interpreted():  # several chunks a row
        found = triton_rows.triton_pack_rows(bits, *of_mask)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("strategy", "tokens", "text_tokens", "heads"),
    [
        ("U2R1", 100, 0, 2),
        ("U2R1", 100, 32, 2),
        ("U2R1", 100, 20, None),
        ("U2R2", 100, 0, None),
        ("U3R1", 100, 0, None),
    ],
)
def test_whole_heads_are_recognised(strategy, tokens, text_tokens, heads):
    grid = BlockGrid.uniform(tokens, 16, text_tokens)
    plan = make_plan(BlockMask.dense(4, grid), strategy)
    found = whole_head_tokens(plan)
    if heads is None:
        assert (plan.split_heads > 0) == (strategy == "U3R1")
        assert found is None
    else:
        assert found == tokens
        assert [len(plan.rows_of(rank)[0]) for rank in range(2)] == [heads * grid.nq] * 2


def dense_parts(mask: BlockMask) -> tuple[DensePart, ...]:
    """Returns the parts of the dense rows of one rank without a ring: heads are whole, and follow one another."""
    dense = dense_spans_of(mask, torch.device("cuda"))
    (of_chunk,) = build_tables(table_layout(make_plan(mask, "U1R1"), 0), mask, dense).dense
    return of_chunk.parts if of_chunk else ()


def covered(starts: range, count: int) -> list[list[int]]:
    return [list(range(start, start + count)) for start in starts]


@pytest.mark.parametrize("tokens", [96, 100])
@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        ([], []),
        ([0, 1, 2, 3, 4], [range(5)]),
        ([3], [range(3, 4)]),
        ([1, 4], [range(1, 5, 3)]),
        ([0, 2, 4], [range(0, 5, 2)]),
        ([0, 1, 3], [range(2), range(3, 4)]),
        ([0, 1, 3, 4], [range(2), range(3, 5)]),
    ],
)
def test_equal_dense_heads_at_equal_distance_are_one_part(heads, groups, tokens):
    grid = BlockGrid.uniform(tokens, 16)
    bits = torch.rand(5, grid.nq, grid.nk) < 0.5
    bits[:, 0, 0], bits[heads] = False, True
    parts, n = dense_parts(BlockMask(bits, grid)), grid.nq
    every = [[list(range(head * n, (head + 1) * n)) for head in group] for group in groups]
    assert [covered(part.row_starts, part.rows) for part in parts] == every
    assert [covered(part.block_starts, part.blocks) for part in parts] == every
    for part in parts:
        assert (part.tokens is None) == (tokens == 96)
        assert part.tokens is None or part.tokens.tolist() == list(range(tokens))


def test_single_token_stays_with_the_block_kernel():
    """cuDNN takes no single key."""
    packed = BlockMask.packed([BlockMask.dense(2, BlockGrid.uniform(tokens, 16)) for tokens in (1, 40)])
    assert [covered(part.row_starts, part.rows) for part in dense_parts(packed)] == [[[1, 2, 3], [5, 6, 7]]]
