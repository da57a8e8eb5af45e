"""Runs of tokens between tensors of any strides, copied as they are or as int8, by torch and by Triton."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels.exchange import (
    CopySegments,
    as_heads,
    copy_segments,
    copy_to_both,
    quantise_segments,
    restore_rows,
    rotate_segments,
    row_words,
    rows_of_tokens,
)
from dbsp_kernels.rounding import TINY
from tests.support.generators import SEEDS, examples
from tests.support.interpreter import interpreted
from tests.support.oracle import int8_of, rotated_back

CPU = torch.device("cpu")
LAYOUTS = {
    "heads, then tokens": (0, 1, 2, 3),
    "tokens, then heads": (0, 2, 1, 3),
    "tokens, then the batch": (2, 0, 1, 3),
    "D scattered": (3, 1, 2, 0),
}
UNTOUCHED = 7.0


def laid_out(shape: list[int], layout: str, fill: torch.Tensor | None = None) -> torch.Tensor:
    """Returns a tensor of this shape whose memory is in another order."""
    order = LAYOUTS[layout]
    tensor = torch.full([shape[d] for d in order], UNTOUCHED).permute(*np.argsort(order).tolist())
    return tensor if fill is None else tensor.copy_(fill)


def one_by_one(source: torch.Tensor, destination: torch.Tensor, table: np.ndarray) -> torch.Tensor:
    """Returns what the runs describe, copied token by token."""
    expected = destination.clone()
    for from_head, from_token, to_head, to_token, length, zeros in table.tolist():
        for i in range(length):
            expected[:, to_head, to_token + i] = source[:, from_head, from_token + i]
        for i in range(zeros):
            expected[:, to_head, to_token + length + i] = 0
    return expected


@st.composite
def copies(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Draws a source, a destination, and runs between them that do not overlap in the destination."""
    rng = np.random.default_rng(draw(SEEDS))
    batch, width, count = draw(st.integers(1, 2)), draw(st.sampled_from([1, 8, 24])), draw(st.integers(0, 8))
    from_heads, to_heads, longest = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 40]))
    length, zeros = rng.integers(0, longest + 1, count), rng.integers(0, 3, count)
    distances = rng.integers(0, 3, count)
    to_token = np.cumsum(length + zeros + distances) - (length + zeros)
    from_token = rng.integers(0, 50, count)
    from_head, to_head = (rng.integers(heads, size=count) for heads in (from_heads, to_heads))
    table = np.stack([from_head, from_token, to_head, to_token, length, zeros], axis=1)
    source_shape = [batch, from_heads, 50 + longest, width]
    source = torch.from_numpy(rng.standard_normal(source_shape)).float()
    destination_shape = [batch, to_heads, int((to_token + length + zeros).max(initial=0)) + 2, width]
    layouts = st.sampled_from(list(LAYOUTS))
    source = laid_out(source_shape, draw(layouts), source)
    if draw(st.booleans()):  # the same for all of the batch, without a copy for each
        source = source[:1].expand_as(source)
    return source, laid_out(destination_shape, draw(layouts)), table


@contextmanager
def triton_interpreted() -> Iterator[ModuleType]:
    """Runs Triton's kernels of exchanges in its interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which scripts/gpu_suite runs the kernel")
    with interpreted():
        yield importlib.import_module("dbsp_kernels.triton.exchange")


def copied_by_triton(sources: list[torch.Tensor], destination: torch.Tensor, segments: list[CopySegments]) -> None:
    with triton_interpreted() as kernels:
        kernels.triton_copy_segments(sources, destination, segments)


BOTH = st.sampled_from([copy_segments, copied_by_triton])


@given(copies(), BOTH)
@examples(40)
def test_runs_are_copied_and_nothing_else_is_touched(case, copy):
    source, destination, table = case
    expected, segments = one_by_one(source, destination, table), CopySegments.from_columns(table, CPU)
    copy([source], destination, [segments])
    assert torch.equal(destination, expected)


@given(st.lists(copies(), min_size=1, max_size=3), BOTH)
@examples(30)
def test_several_sources_are_gathered_in_one_launch(cases, copy):
    """Copies as q, k and v are: the destinations of all lie one behind the other."""
    (like, first, _), *_ = cases
    sources = [torch.randn(like.shape) for _ in cases]
    destination, segments = torch.full_like(first.repeat(1, 3, 4, 1), UNTOUCHED), []
    expected = destination.clone()
    for i, (source, (_, _, table)) in enumerate(zip(sources, cases, strict=True)):
        table = table.copy()
        table[:, 0] %= like.shape[1]
        table[:, 1] %= 3
        kept = (table[:, 1] + table[:, 4] <= like.shape[2]) & (table[:, 3] + table[:, 4:].sum(1) <= first.shape[2])
        table = table[kept]
        table[:, 2] = table[:, 2] % first.shape[1] + i * first.shape[1]
        if len({(to, at) for _, _, to, at, _, _ in table.tolist()}) < len(table):
            table = table[:1]
        expected = one_by_one(source, expected, table)
        segments.append(CopySegments.from_columns(table, CPU))
    copy(sources, destination, segments)
    assert torch.equal(destination, expected)


def far_apart(file: Path, axis: int) -> torch.Tensor:
    """Returns [1, 1, 3, 3], along an axis 2^31 elements from first to last, in a sparse file.

    It begins in the middle of the file: where an offset of 2^31 wraps around to −2^31 there is memory, too.
    """
    file.touch()
    os.truncate(file, 5 << 30)
    whole = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+"))
    return whole[1 << 31 :].as_strided((1, 1, 3, 3), [1 << 30 if of == axis else 1 for of in range(4)])


@pytest.mark.parametrize("axis", [2, 3], ids=["tokens", "D"])
def test_offsets_within_a_segment_pass_32_bits(tmp_path, axis):
    source, destination = far_apart(tmp_path / "source", axis), far_apart(tmp_path / "destination", axis)
    source[:] = torch.arange(9).view(3, 3) + 10
    destination[:] = 99
    for columns, expected in (([0, 0, 0, 0, 3, 0], source), ([0, 0, 0, 0, 0, 3], torch.zeros_like(source))):
        copied_by_triton([source], destination, [CopySegments.from_columns(np.array([columns]), CPU)])
        assert torch.equal(destination, expected)


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbers_and_scales(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.view(torch.int8)[..., :width], rows.view(torch.float32)[..., -1]


def tokens_of(seed: int, *shape: int) -> torch.Tensor:
    """Returns tokens of very different lengths, some all zeros, some with halves to be rounded."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 6, shape[:-1], generator=generator)
    tokens = torch.randn(shape, generator=generator) * sizes[..., None]
    tokens.view(-1, shape[-1])[::5] = 0
    halves = tokens.view(-1, shape[-1])[1::5]
    halves.copy_(torch.arange(halves.numel()).view(halves.shape) % 254 - 126.5)
    halves[:, 0] = 127.0  # the scale is 1
    return tokens


WIDTHS = (1, 3, 8, 24, 64, 72, 80, 96, 112, 120, 128, 256)
"""Head sizes of tiny models, and all that video models have."""


@given(SEEDS, st.sampled_from(WIDTHS), st.booleans())
@examples(40)
def test_numbers_and_scales_are_those_of_plain_arithmetic(seed, width, rotate):
    tokens = tokens_of(seed, 40, width)
    numbers, scales = numbers_and_scales(rows_of_tokens(tokens, rotate), width)
    expected, expected_scales = int8_of(tokens.numpy(), rotate)
    assert numbers.equal(torch.from_numpy(expected))
    assert scales.equal(torch.from_numpy(expected_scales))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_token_that_is_not_finite_is_nan_alone(bad):
    tokens = torch.ones(3, 8)
    tokens[1, 2], tokens[2] = bad, TINY / 16  # too small for a scale, rotated too
    restored = restore_rows(rows_of_tokens(tokens), 8, torch.float32)
    assert restored.isnan().all(-1).tolist() == [False, True, False]
    assert not restored[2].any()


@st.composite
def packings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, np.ndarray, tuple[int, ...]]:
    """Draws tokens, what is subtracted from them, segments that pack them, and the buffer's shape."""
    rng = np.random.default_rng(draw(SEEDS))
    batch, heads, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([23, *WIDTHS]))
    count, longest = draw(st.integers(0, 6)), draw(st.sampled_from([1, 5, 70]))
    length = rng.integers(0, longest + 1, count)
    to_token = np.cumsum(length + rng.integers(0, 2, count)) - length
    columns = (rng.integers(heads, size=count), rng.integers(0, 20, count), 0 * length, to_token, length, 0 * length)
    dtype = draw(st.sampled_from(DTYPES[:3]))
    tokens = tokens_of(draw(SEEDS), batch, heads, 20 + longest, width).to(dtype)
    if draw(st.booleans()):
        tokens = tokens.transpose(1, 2).contiguous().transpose(1, 2)
    less = torch.randn(batch, heads, width) if draw(st.booleans()) else None
    slots = int((to_token + length).max(initial=0)) + 2
    return tokens, less, np.stack(columns, axis=1), (batch, 1, slots, row_words(width))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # infinities in the interpreter
@given(packings(), st.booleans(), st.booleans())
@examples(40)
def test_segments_are_rounded_and_nothing_else_is_touched(case, rotate, by_triton):
    tokens, less, columns, shape = case
    buffer = torch.full(shape[2:3] + shape[:1] + shape[3:], 12345, dtype=torch.int32).transpose(0, 1)[:, None]
    expected = buffer.clone()
    for head, token, _, to, length, _ in columns.tolist():
        values = tokens[:, head, token : token + length].float()
        values = values if less is None else values - less[:, head, None]
        expected[:, 0, to : to + length] = rows_of_tokens(values, rotate) if length else 0
    segments = CopySegments.from_columns(columns, CPU)
    if by_triton:
        with triton_interpreted() as kernels:
            kernels.triton_quantise_segments(tokens, buffer, segments, less, rotate)
    else:
        quantise_segments(tokens, buffer, segments, less, rotate=rotate)
    assert buffer.equal(expected)


@pytest.mark.parametrize("by_triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("is_int8", [False, True], ids=["tokens", "rows"])
@pytest.mark.parametrize(("width", "dtype"), [(128, torch.float32), (24, torch.bfloat16), (96, torch.float16)])
def test_segments_are_rotated_back(width, dtype, is_int8, by_triton):
    """Rotates what an exchange brought back, zeros behind it; one token has a number that is not finite."""
    batch = 1 if width == 128 else 2
    came = torch.randn(20, batch, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    came[5, 0, 1] = torch.inf
    source = rows_of_tokens(came.float(), rotate=False) if is_int8 else came
    local = torch.full((batch, 12, 2, width), 9.0, dtype=dtype).transpose(1, 2)  # tokens, then heads
    table = np.array([[0, 3, 1, 0, 4, 2], [0, 8, 0, 2, 9, 0]])
    tokens = restore_rows(source, width, torch.float32) if is_int8 else came.float()
    finite = rotated_back(tokens.nan_to_num(0, 0, 0)).float()
    expected = one_by_one(as_heads(finite), local.float(), table)
    segments = CopySegments.from_columns(table, CPU)
    if by_triton:
        with triton_interpreted() as kernels:
            kernels.triton_rotate_segments(source, local, segments)
    else:
        rotate_segments(source, local, segments)
    broken = torch.zeros(batch, 2, 12, dtype=torch.bool)
    broken[0, 1, 2] = True
    assert local.isfinite().all(dim=-1).equal(~broken)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(local[~broken].float(), expected[~broken], rtol=eps, atol=max(eps / 8, 3e-7))


@pytest.mark.parametrize("is_int8", [False, True], ids=["tokens", "rows"])
@pytest.mark.parametrize("width", WIDTHS)
def test_rotating_back_is_bitwise_the_same_in_torch_and_triton(width, is_int8):
    came = tokens_of(width, 40, 2, width)
    source = rows_of_tokens(came, rotate=False) if is_int8 else came
    segments = CopySegments.from_columns(np.array([[0, 3, 1, 0, 30, 2], [0, 33, 0, 2, 5, 0]]), CPU)
    by_torch, by_triton = (torch.full((2, 2, 32, width), 9.0) for _ in range(2))
    rotate_segments(source, by_torch, segments)
    with triton_interpreted() as kernels:
        kernels.triton_rotate_segments(source, by_triton, segments)
    assert by_torch.equal(by_triton)


@pytest.mark.parametrize("by_triton", [False, True], ids=["torch", "triton"])
@pytest.mark.parametrize("empty", [None, 0, 1], ids=["both", "second alone", "first alone"])
def test_one_buffer_is_copied_to_both_destinations(by_triton, empty):
    """Copies q, and k and v, out of a buffer [tokens, B, D] as one exchange leaves it."""
    buffer, batch = torch.randn(20, 2, 5), 2
    packed_q, packed_kv = torch.full((batch, 1, 8, 5), 9.0), torch.full((2, batch, 12, 5), 9.0).transpose(0, 1)
    of_q = np.array([[0, 3, 0, 0, 4, 0], [0, 0, 0, 4, 3, 1]])
    of_kv = np.array([[0, 7, 0, 2, 6, 0], [0, 13, 1, 0, 7, 2]])
    tables = [table[:0] if number == empty else table for number, table in enumerate((of_q, of_kv))]
    expected = [one_by_one(as_heads(buffer), *each) for each in zip((packed_q, packed_kv), tables, strict=True)]
    segments = [CopySegments.from_columns(table, CPU) for table in tables]
    if by_triton:
        with triton_interpreted() as kernels:
            kernels.triton_copy_to_both(buffer, [packed_q, packed_kv], segments)
    else:
        copy_to_both(buffer, [packed_q, packed_kv], segments)
    assert packed_q.equal(expected[0])
    assert packed_kv.equal(expected[1])
