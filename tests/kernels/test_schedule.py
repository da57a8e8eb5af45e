"""The order of rows and their parts, in torch and in Triton; and that parts merge to what whole rows give."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels import block_attention, merge_states, schedule
from dbsp_kernels.row_parts import RowParts, most_added_parts
from dbsp_kernels.schedule import cut_rows, order_rows
from dbsp_kernels.triton.tiles import slots_of
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error, rounded_to_int8
from tests.support.generators import SEEDS, examples
from tests.support.interpreter import interpreted

MOST_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_suite runs the kernels")


@st.composite
def counted_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int]:
    """Draws the blocks of rows in one or two chunks, how many are full, the rows' heads, slots and copies."""
    rng = np.random.default_rng(draw(SEEDS))
    chunks, rows, width = draw(st.integers(1, 2)), draw(st.integers(1, 90)), draw(st.sampled_from([8, 60, 600]))
    kind = draw(st.sampled_from(["skewed", "equal", "few long", "none"]))
    count = (rng.beta(0.4, 2, (chunks, rows)) * width).astype(np.int32)
    if kind in ("equal", "none"):
        count[:] = width if kind == "equal" else 0
    if kind == "few long":
        count[:, : max(1, rows // 10)] = width
    full = (count * rng.random((chunks, rows))).astype(np.int32)
    heads = np.sort(rng.integers(0, 4, rows))
    tables = (torch.from_numpy(table) for table in (count, full, heads))
    return (*tables, draw(st.integers(1, 24)), draw(st.integers(1, 2)))


@given(case=counted_rows())
@examples(40)
def test_long_rows_start_first_and_the_lightest_last(case):
    count, _, spans, slots, batch = case
    head = spans.repeat(batch) + torch.arange(batch).repeat_interleave(len(spans)) * 1000
    for of_chunk, order in zip(count.repeat(1, batch).tolist(), order_rows(count, spans, slots, batch), strict=True):
        total, done, place = sum(of_chunk), 0, {}
        for row in sorted(range(len(of_chunk)), key=lambda row: (-of_chunk[row], row)):
            done += of_chunk[row]
            lightest = done > total - total // 10
            place[row] = -1 if 10 * slots * of_chunk[row] > total else 1e6 if lightest else int(head[row])
        expected = sorted(place, key=lambda row: (place[row], -of_chunk[row], row))
        assert order.tolist() == expected


def items_of(parts: RowParts) -> torch.Tensor:
    """Returns int64[n, 5], the items that are used."""
    return parts.items[parts.items[:, 0] >= 0].long()


@given(case=counted_rows())
@examples(40)
def test_parts_of_a_row_are_its_list_in_order(case):
    count, full, spans, slots, batch = case
    order = order_rows(count, spans, slots, batch)
    for chunk, parts in enumerate(cut_rows(*case)):
        blocks, whole = count[chunk].repeat(batch), full[chunk].repeat(batch)
        items, cuts = items_of(parts), {int(row): (int(slot), int(n)) for row, slot, n in parts.cuts if n > 0}
        assert len(items) - len(blocks) <= most_added_parts(slots)
        assert items[:, 0].unique_consecutive().tolist() == order[chunk].tolist()
        used = set()
        for row in range(len(blocks)):
            of_row = items[items[:, 0] == row]
            bounds = [0, *(of_row[:, 1] + of_row[:, 2]).tolist()]
            assert of_row[:, 1].tolist() == bounds[:-1]
            assert bounds[-1] == blocks[row]
            for start, length, short_from in of_row[:, 1:4].tolist():
                assert short_from == min(max(int(whole[row]) - start, 0), length)
            slots_of_row = of_row[:, 4].tolist()
            if len(of_row) == 1:
                assert slots_of_row == [-1]
                continue
            first, parts_of_row = cuts.pop(row)
            assert slots_of_row == list(range(first, first + parts_of_row))
            assert used.isdisjoint(slots_of_row)
            used.update(slots_of_row)
            assert int(of_row[:, 2].min()) >= schedule.LEAST_BLOCKS
        assert not cuts
        assert max(used, default=-1) < parts.places


@without_gpu
@given(case=counted_rows())
@examples(12)
def test_triton_kernels_order_and_cut_rows_as_torch(case):
    pytest.importorskip("triton")
    from dbsp_kernels.triton.schedule import triton_cut_rows, triton_order_rows

    count, _, spans, slots, batch = case
    with interpreted():
        order, (items, cuts) = triton_order_rows(count, spans, slots, batch), triton_cut_rows(*case)
    assert torch.equal(order, order_rows(count, spans, slots, batch))
    for chunk, parts in enumerate(cut_rows(*case)):
        used, is_cut = parts.items[:, 0] >= 0, parts.cuts[:, 2] > 0
        assert torch.equal(items[chunk][:, 0] >= 0, used)
        assert torch.equal(items[chunk][used], parts.items[used])
        assert torch.equal(cuts[chunk][:, 2] > 0, is_cut)
        assert torch.equal(cuts[chunk][is_cut], parts.cuts[is_cut])


def test_parts_are_never_more_than_there_is_room_for():
    """Without the guard, of counts made to have many parts; the bound is nearly reached, so it is not a loose one."""
    rng, most = np.random.default_rng(0), 0.0
    for trial in range(100):
        slots, rows = int(rng.choice([8, 13, 132])), int(rng.integers(1, 600))
        geometric = np.exp(-np.arange(rows) / rng.uniform(1, 2 * slots)) * 30_000
        counts = geometric if trial % 2 else rng.pareto(0.7, rows) * 5
        count = torch.from_numpy(counts.clip(0, 100_000).astype(np.int32))[None]
        with mock.patch.object(schedule, "PART_BLOCKS", -(10**6)):  # cutting seems to cost nothing
            (parts,) = cut_rows(count, count, torch.zeros(rows, dtype=torch.int64), slots)
        added = len(items_of(parts)) - rows
        assert added <= most_added_parts(slots)
        most = max(most, added / most_added_parts(slots))
    assert most > 0.8


@pytest.mark.parametrize(("rows", "text", "is_cut"), [(384, 0, False), (396, 0, False), (384, 4, True), (30, 0, True)])
def test_equal_rows_stay_whole(rows, text, is_cut):
    """A last wave of parts would be filled as badly as one of rows; but long rows of text are cut."""
    count = torch.full((1, rows), 104, dtype=torch.int32)
    count[:, :text] = 512
    (parts,) = cut_rows(count, count, torch.arange(rows) // 256, 132)
    assert bool((parts.cuts[:, 2] > 0).any()) == is_cut


def cut(p: Packed, slots: int, batch: int = 1) -> RowParts:
    """Cuts rows whose full blocks are first; also short ones, and however little is gained."""
    with mock.patch.multiple(schedule, LEAST_BLOCKS=2, PART_BLOCKS=-(10**6)):
        count, full = (table[None, : len(p.q) // batch] for table in (p.kv_count, full_counts(p)))
        (parts,) = cut_rows(count, full, torch.zeros(count.shape[1], dtype=torch.int64), slots, batch)
    assert (parts.cuts[:, 2] > 0).sum() > 1
    assert (parts.items[:, 4] < 0).any()
    return parts


def long_rows(dtype: torch.dtype = torch.float32, **sizes: int) -> Packed:
    """Rows of every length, two of them of all blocks and one of none."""
    options = {"rows": 9, "blocks": 26, "block_q": 16, "block_k": 16, "head_dim": 32} | sizes
    p = packed(**options, dtype=dtype)
    p.kv_index[:2] = torch.arange(options["blocks"])
    p.kv_count[:2], p.kv_count[2], p.kv_count[3] = options["blocks"], 0, 1
    return kinder(p)


def attend(p: Packed, kernel: str = "triton", **options) -> tuple[torch.Tensor, torch.Tensor]:
    return block_attention(*vars(p).values(), kernel=kernel, kv_full=full_counts(p), **options)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("triton", torch.float32), ("triton", torch.bfloat16), ("triton-int8", torch.float16)],
    ids=str,
)
def test_rows_in_parts_are_as_exact_as_whole_ones(interpreter, kernel, dtype):
    p = long_rows(dtype)
    parts = cut(p, slots=3)
    out, lse = attend(p, kernel, parts=parts)
    expected, expected_lse = (rounded_to_int8(p) if kernel == "triton-int8" else p).exact()
    most = MOST_ERROR[dtype] if kernel == "triton" else max(1e-5, MOST_ERROR[dtype])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert relative_error(out, expected) <= most
    some = p.kv_count > 0
    torch.testing.assert_close(lse[some].double(), expected_lse[some].double(), rtol=2e-5, atol=2e-5)
    assert (out[~some] == 0).all()
    assert torch.isneginf(lse[~some]).all()
    # Rows that stay whole are bitwise as without parts, and each run gives the same.
    whole, whole_lse = attend(p, kernel)
    uncut = torch.ones(len(p.q), dtype=torch.bool)
    uncut[parts.cuts[parts.cuts[:, 2] > 0, 0].long()] = False
    assert torch.equal(out[uncut], whole[uncut])
    assert torch.equal(lse[uncut], whole_lse[uncut])
    again, again_lse = attend(p, kernel, parts=parts)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_merge_into_what_was_there(interpreter, dtype):
    """As chunks of a ring do: the first chunk is fp32, the last one writes the model's dtype."""
    first, p = long_rows(dtype, seed=1), long_rows(dtype)
    first = replace(first, q=p.q)
    partial = attend(first, parts=cut(first, slots=4), out_dtype=torch.float32)
    out, lse = attend(p, parts=cut(p, slots=3), partial=partial, out_dtype=dtype)
    expected, expected_lse = merge_states(*first.exact(), *p.exact())
    assert out.dtype == dtype
    assert relative_error(out, expected) <= MOST_ERROR[dtype]
    some = ~torch.isneginf(expected_lse)
    torch.testing.assert_close(lse[some].double(), expected_lse[some], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("head_dim", "block_q", "block_k"), [(64, 16, 8), (24, 21, 21)])
def test_parts_of_rows_of_any_size(interpreter, head_dim, block_q, block_k):
    p = long_rows(head_dim=head_dim, block_q=block_q, block_k=block_k)
    assert relative_error(attend(p, parts=cut(p, slots=3))[0], p.exact()[0]) <= 1e-6


def test_a_lost_part_is_seen(interpreter):
    """Negative control of the tests above, and of the check of tables on CPUs."""
    p = long_rows()
    parts = cut(p, slots=3)
    merged = torch.nonzero(parts.cuts[:, 2] > 1)[0, 0]
    fewer = parts.cuts.clone()
    fewer[merged, 2] -= 1
    out, _ = attend(p, parts=replace(parts, cuts=fewer))
    assert relative_error(out, p.exact()[0]) > 1e-3
    items = parts.items.clone()
    items[torch.nonzero(items[:, 4] >= 0)[0, 0], 2] -= 1
    with pytest.raises(ValueError, match="the parts of each row must list as many blocks"):
        attend(p, parts=replace(parts, items=items))


def test_other_kernels_reject_parts():
    p = long_rows()
    with pytest.raises(ValueError, match="'cpu' does not support cut rows"):
        attend(p, "cpu", parts=cut(p, slots=3))


@pytest.mark.parametrize(
    ("multiprocessors", "capability", "block_q", "slots"),
    [(132, 90, 128, 132), (132, 90, 64, 264), (108, 80, 128, 216), (148, 100, 128, 148), (170, 120, 128, 170)],
)
def test_slots_are_rows_at_a_time(multiprocessors, capability, block_q, slots):
    assert slots_of(multiprocessors, capability, (block_q, 64), 128, torch.bfloat16) == slots
