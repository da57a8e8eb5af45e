"""Every kernel at the main shapes and at others, against its twin in float64 or bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import torch

from dbsp_kernels import block_attention_backward, merge_into
from dbsp_kernels import prediction as predicted
from dbsp_kernels.exchange import copy_segments, quantise_segments, restore_rows, rotate_segments, row_words
from dbsp_kernels.row_parts import RowParts
from dbsp_kernels.schedule import cut_rows, order_rows
from dbsp_kernels.segments import CopySegments
from dbsp_kernels.tables import expand_rows, pack_rows
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.setting import MOST_ERROR, Setting, Shape
from tests.kernels.backward_inputs import expected_and_inputs
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error, rounded_to_int8

MOST_GRADIENT_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")

WINDOW = (120, 120)  # blocks that tiles do not divide: Wan's window tiles


def cases(setting: Setting) -> Iterator[Case]:
    first = setting.main[0]
    window = first if setting.dry else first._replace(block_q=WINDOW[0], block_k=WINDOW[1])
    yield from of_shapes(setting, dict.fromkeys((*setting.main, window, first._replace(head_dim=first.head_dim // 2))))
    yield from of_tokens(setting, (first.head_dim,), (setting.dtype, torch.float32))
    yield Case("row bits", partial(row_bits, setting))
    yield Case("range checks", partial(range_checks, setting))


def other_cases(setting: Setting) -> Iterator[Case]:
    """Yields the other shapes with heads of 64 and more that are shipped, largest first, and odd ones."""
    yield from of_shapes(setting, setting.other_shapes)
    if not setting.dry:
        yield from of_tokens(setting, (64, 80), (torch.bfloat16, torch.float16))


def of_shapes(setting: Setting, shapes: Iterable[Shape]) -> Iterator[Case]:
    for shape in shapes:
        yield Case(f"forward, {shape.name}", partial(forward, setting, shape))
        yield Case(f"merging, {shape.name}", partial(merging, setting, shape))
        yield Case(f"long rows, {shape.name}", partial(long_rows, setting, shape))
        yield Case(f"backward, {shape.name}", partial(backward, setting, shape))


def of_tokens(setting: Setting, head_dims: Iterable[int], dtypes: Iterable[torch.dtype]) -> Iterator[Case]:
    for head_dim, dtype in itertools.product(head_dims, dict.fromkeys(dtypes)):
        of = f"D {head_dim}, {str(dtype)[6:]}"
        yield Case(f"prediction, {of}", partial(prediction, setting, head_dim, dtype))
        yield Case(f"int8, {of}", partial(int8, setting, head_dim, dtype))
        yield Case(f"segments, {of}", partial(segments, setting, head_dim, dtype))


def packed_for(setting: Setting, shape: Shape, seed: int = 1) -> Packed:
    rows, blocks = (3, 4) if setting.dry else (40, 30)
    made = packed(rows, blocks, shape.block_q, shape.block_k, shape.head_dim, shape.dtype, seed)
    return kinder(replace(made, kv_index=made.kv_index.clamp(min=0)))


def differing(what: str, actual: torch.Tensor, twin: torch.Tensor) -> Row:
    """Counts the numbers that are not the twin's; where its number is NaN, NaN is the same."""
    actual = actual.cpu()
    same = (actual == twin) | (actual != actual) & (twin != twin)
    return Row(what, float((~same).sum()), "", 0.0)


def forward(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Runs it without hints, with the number of full blocks, for the fast loop, and with q and k as int8."""
    p = packed_for(setting, shape)
    exact, rounded = p.exact(), rounded_to_int8(p).exact()
    full_first = full_counts(p).to(setting.device)
    some = p.kv_count > 0
    for name, kernel, hint, (expected, expected_lse) in (
        ("", "triton", None, exact),
        (" with full blocks first", "triton", full_first, exact),
        (" of int8", "triton-int8", None, rounded),
        (" of int8 with full blocks first", "triton-int8", full_first, rounded),
    ):
        out, lse = (t.cpu() for t in p.to(setting.device).attend(kernel, kv_full=hint))
        yield Row(f"error{name}", relative_error(out, expected), "‖·‖", MOST_ERROR[shape.dtype])
        yield Row(f"error of lse{name}", float((lse - expected_lse)[some].abs().max()), "", 2e-3)
        empty = int(out[~some].any()) + int((~torch.isneginf(lse[~some])).any())
        yield Row(f"empty rows that are not empty{name}", empty, "", 0.0)


def merging(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Merges the other half of each row's blocks into a partial result: inside the kernel, and by our merge."""
    p = packed_for(setting, shape)
    half, width = p.kv_count // 2, p.kv_index.shape[1]
    later = p.kv_index.gather(1, (torch.arange(width)[None] + half[:, None]).clamp(max=width - 1))
    first = replace(p, kv_count=half).to(setting.device).attend("triton", out_dtype=torch.float32)
    second = replace(p, kv_index=later, kv_count=p.kv_count - half).to(setting.device)
    merged = tuple(part.clone() for part in first)
    merge_into(*merged, *second.attend("triton"))
    out, lse = second.attend("triton", partial=first, out_dtype=shape.dtype)
    expected, _ = p.exact()
    yield Row("error in the kernel", relative_error(out.cpu(), expected), "‖·‖", MOST_ERROR[shape.dtype])
    yield Row("error by a merge", relative_error(merged[0].cpu(), expected), "‖·‖", MOST_ERROR[shape.dtype])
    apart = (lse - merged[1])[torch.isfinite(lse)].abs()
    yield Row("difference of lse", float(apart.max()), "", 1e-3)


def long_rows(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Orders rows and cuts long ones, as torch does, and merges their parts."""
    from dbsp_kernels.triton.schedule import triton_cut_rows, triton_order_rows

    rows, blocks, slots = (6, 80, 3) if setting.dry else (40, 120, 12)
    made = packed(rows, blocks, shape.block_q, shape.block_k, shape.head_dim, shape.dtype, seed=1)
    p = kinder(replace(made, kv_index=made.kv_index.clamp(min=0)))
    full, spans = full_counts(p), torch.arange(rows) // 20
    count, of_full, on = p.kv_count[None], full[None], setting.device
    # 1. The order and the cuts; items that are not used may differ.
    order = triton_order_rows(count.to(on), spans.to(on), slots, 1)
    yield differing("places of rows that differ", order, order_rows(count, spans, slots))
    (parts,) = cut_rows(count, of_full, spans, slots)
    (items,), (cuts,) = triton_cut_rows(count.to(on), of_full.to(on), spans.to(on), slots, 1)
    used = parts.items[:, 0] >= 0
    yield Row("cases in which no row is cut", float(not parts.cuts[:, 2].any()), "", 0.0)
    yield differing("items that differ", items.cpu()[used], parts.items[used])
    yield differing("cuts that differ", cuts.cpu()[:, 2], parts.cuts[:, 2])
    # 2. What they give, with int8 too.
    for name, kernel, expected in (("", "triton", p), (" of int8", "triton-int8", rounded_to_int8(p))):
        out = p.to(on).attend(kernel, kv_full=full.to(on), parts=RowParts(items, cuts))[0].cpu()
        yield Row(f"error{name}", relative_error(out, expected.exact()[0]), "‖·‖", MOST_ERROR[shape.dtype])


def backward(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Gradients against autograd of the same attention in float64, twice: bits must repeat."""
    expected, inputs = expected_and_inputs(packed_for(setting, shape), device=setting.device)
    gradients, gradients_again = (block_attention_backward(inputs, "triton") for _ in range(2))
    for name, gradient, repeated, exact in zip("qkv", gradients, gradients_again, expected, strict=True):
        error = relative_error(gradient.cpu(), exact)
        yield Row(f"error of d{name}", error, "‖·‖", MOST_GRADIENT_ERROR[shape.dtype])
        yield differing(f"numbers of d{name} that change when repeated", gradient, repeated.cpu())


def prediction(setting: Setting, head_dim: int, dtype: torch.dtype) -> Iterator[Row]:
    """Sums of blocks, their means, scores, and the blocks chosen, each from the twin's input."""
    from dbsp_kernels.triton import prediction as on_gpu

    rng = np.random.default_rng(0)
    blocks = 6 if setting.dry else 150
    lengths = rng.integers(1, 16 if setting.dry else 130, blocks)
    first = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    tokens = torch.randn(2, 3, int(first[-1]), head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    position, on = torch.from_numpy(rng.permutation(int(first[-1]))), setting.device

    def differ(name: str, actual: torch.Tensor, twin: torch.Tensor) -> Row:
        return differing(f"{name} that differ from the twin's", actual, twin)

    sums = predicted.sum_tokens(tokens, position, first)
    yield differ("sums", on_gpu.sum_tokens_triton(tokens.to(on), position.to(on), first.to(on)), sums)
    counts = torch.from_numpy(lengths)
    rows = predicted.pool_rows(sums, counts)
    yield differ("means", on_gpu.pool_rows_triton(sums.to(on), counts.to(on)), rows)
    rows, nq = rows.flatten(0, 1), blocks // 3
    scores = predicted.pooled_scores(rows, nq, head_dim**-0.5, 0.02)
    yield differ("scores", on_gpu.pooled_scores_triton(rows.to(on), nq, head_dim**-0.5, 0.02), scores)
    chance, dense = torch.softmax(scores * 30, dim=-1), rows[..., -1] <= 0.02
    for cdf, count in ((0.9, 0), (None, max(1, nq // 4))):
        chosen = on_gpu.select_blocks_triton(chance.to(on), dense.to(on), cdf, count)
        yield differ(f"blocks by {cdf or count}", chosen, predicted.select_blocks(chance, dense, cdf, count))


def segment_table(setting: Setting, mean: int, zeros: int) -> tuple[np.ndarray, int]:
    """Draws int[n, 6] segments of `mean` tokens from 5 heads of 600 tokens, and counts the positions they fill."""
    rng = np.random.default_rng(mean)
    count = 8 if setting.dry else 500
    length = rng.integers(1, 2 * mean + 1, count)
    to = np.cumsum(length + zeros) - (length + zeros)
    columns = [rng.integers(5, size=count), rng.integers(0, 400, count), 0 * to, to, length, 0 * to + zeros]
    return np.stack(columns, axis=1), int((length + zeros).sum())


def int8(setting: Setting, head_dim: int, dtype: torch.dtype) -> Iterator[Row]:
    """Tokens rotated and rounded to int8 while they are packed, restored, and rotated back."""
    from dbsp_kernels.triton.exchange import triton_quantise_segments, triton_rotate_segments

    for mean in (1, 64):
        table, positions = segment_table(setting, mean, 0)
        size = 10.0 ** torch.randint(-4, 4, (2, 600, 5, 1))
        source = (torch.randn(2, 600, 5, head_dim) * size).to(dtype).transpose(1, 2)
        source[0, 0, ::7], source[1, 2, 5, 3] = 0, torch.inf
        less = torch.randn(2, 5, head_dim)
        expected = torch.zeros(2, 1, positions, row_words(head_dim), dtype=torch.int32)
        actual = torch.full_like(expected, 7, device=setting.device)
        quantise_segments(source, expected, CopySegments.from_columns(table, CPU), less)
        restored = restore_rows(expected, head_dim, dtype)
        there = CopySegments.from_columns(table, torch.device(setting.device))
        arguments = (source.to(setting.device), actual, there, less.to(setting.device), True)
        triton_quantise_segments(*arguments)
        scales = (words.view(torch.float32)[..., -1] for words in (actual, expected))
        yield differing(f"scales that differ, segments of {mean}", *scales)
        yield differing(f"words that differ, segments of {mean}", actual[..., :-1], expected[..., :-1])
        back = restore_rows(expected.to(setting.device), head_dim, dtype)
        yield differing(f"restored otherwise, segments of {mean}", back, restored)
        returned = CopySegments.from_columns(table[:, [2, 3, 0, 1, 4, 5]][: 1 if mean == 64 else 8], CPU)
        buffer = torch.randn(positions, 2, head_dim).to(dtype)
        local, on_gpu = (torch.zeros(2, 5, 600, head_dim, dtype=dtype, device=on) for on in (CPU, setting.device))
        rotate_segments(buffer, local, returned)
        triton_rotate_segments(buffer.to(setting.device), on_gpu, returned.to(on_gpu.device))
        yield differing(f"rotated back otherwise, segments of {mean}", on_gpu, local)


def segments(setting: Setting, head_dim: int, dtype: torch.dtype) -> Iterator[Row]:
    """Segments of tokens copied with zeros behind them, and added."""
    from dbsp_kernels.triton.exchange import triton_copy_segments

    for mean in (1, 64):
        for add in (False, True) if dtype == torch.float32 else (False,):  # gradients, which are added, are wide
            table, positions = segment_table(setting, mean, int(not add))
            source = torch.randn(2, 600, 5, head_dim).transpose(1, 2).to(dtype)
            expected = torch.ones(2, 1, positions, head_dim, dtype=dtype)
            actual = expected.to(setting.device)
            copy_segments([source], expected, [CopySegments.from_columns(table, CPU)], add=add)
            there = CopySegments.from_columns(table, torch.device(setting.device))
            triton_copy_segments([source.to(setting.device)], actual, [there], add)
            name = f"numbers {'added' if add else 'copied'} otherwise, segments of {mean}"
            yield differing(name, actual, expected)


def row_bits(setting: Setting) -> Iterator[Row]:
    """Checks masks' rows packed to bits, and bits expanded to tables."""
    from dbsp_kernels.triton.tables import triton_expand_rows, triton_pack_rows

    rng = np.random.default_rng(0)
    rows, width = (5, 24) if setting.dry else (50, 1200)
    mask = torch.from_numpy(rng.random((rows, width)) < 0.4)
    length = torch.from_numpy(rng.integers(63, 65, width)).int()
    order, spans = torch.from_numpy(rng.permutation(rows)), torch.zeros(rows).long()
    columns, present = torch.arange(width)[None, None], torch.ones(1, 1, width, dtype=torch.bool)
    inputs = mask, order, spans, columns, present, (length == 64)[None, None]
    packed_bits = pack_rows(*inputs)
    on_device = triton_pack_rows(*(tensor.to(setting.device) for tensor in inputs))
    for name, tensor, twin in zip(("bits", "counts", "full counts"), on_device, packed_bits, strict=True):
        yield differing(f"{name} that differ", tensor, twin)
    bits, count, full = packed_bits
    arguments = bits, torch.zeros(1, rows, dtype=torch.int32), length, torch.tensor([0, width]).int(), full
    for batch in (1, 3):
        expected = expand_rows(*arguments, width, 64, batch)
        index = triton_expand_rows(*(tensor.to(setting.device) for tensor in arguments), width, 64, batch).cpu()
        used = (torch.arange(width) < count[..., None]).repeat(1, batch, 1)
        yield differing(f"entries that differ, batch {batch}", index[used], expected[used])


def range_checks(setting: Setting) -> Iterator[Row]:
    """Checks that an index beyond the blocks is reported by DBSP_DEBUG, before a kernel reads it."""
    p = packed(block_q=64, block_k=64).to(setting.device)
    bad = replace(p, kv_index=torch.full_like(p.kv_index, 6), kv_count=torch.ones_like(p.kv_count))
    missed = 1
    with mock.patch.dict(os.environ, {"DBSP_DEBUG": "1"}):
        try:
            bad.attend("triton")
        except ValueError:
            missed = 0
    yield Row("indices that are not found", missed, "", 0.0)
