"""Tokens as int8 with a scale each: rounded as said, identical bits by torch and by Triton, and restored."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels.exchange import (
    CopySegments,
    quantise_segments,
    restore_rows,
    row_words,
    rows_of_tokens,
)
from dbsp_kernels.rounding import TINY
from tests.support.generators import SEEDS, examples
from tests.support.interpreter import interpreted
from tests.support.oracle import int8_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def numbers_and_scales(rows: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rows.view(torch.int8)[..., :width], rows.view(torch.float32)[..., -1]


def tokens_of(seed: int, *shape: int) -> torch.Tensor:
    """Tokens of very different lengths, some all zeros, some with halves to be rounded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = (
        torch.randn(shape, generator=generator)
        * 10.0 ** torch.randint(-6, 6, shape[:-1], generator=generator)[..., None]
    )
    tokens.view(-1, shape[-1])[::5] = 0
    halves = tokens.view(-1, shape[-1])[1::5]
    halves.copy_(torch.arange(halves.numel()).view(halves.shape) % 254 - 126.5)
    halves[:, 0] = 127.0  # the scale is 1
    return tokens


@given(SEEDS, st.sampled_from([1, 3, 8, 24, 128]))
@examples(60)
def test_numbers_and_scales_are_those_of_plain_arithmetic(seed, width):
    tokens = tokens_of(seed, 40, width)
    numbers, scales = numbers_and_scales(rows_of_tokens(tokens), width)
    expected, expected_scales = int8_of(tokens.numpy())
    assert numbers.equal(torch.from_numpy(expected))
    assert scales.equal(torch.from_numpy(expected_scales))


def test_halves_go_to_even_and_the_largest_number_is_127():
    numbers, scale = numbers_and_scales(rows_of_tokens(torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5, 126.5]])), 6)
    assert numbers.tolist() == [[127, 0, 2, 0, -2, 126]]
    assert scale.item() == 1.0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_token_that_is_not_finite_is_nan_alone(bad):
    tokens = torch.ones(3, 8)
    tokens[1, 2] = bad
    restored = restore_rows(rows_of_tokens(tokens), 8, torch.float32)
    assert restored.isnan().all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("size", [0.0, TINY / 2, 1e-44])
def test_tokens_too_small_for_a_scale_are_zeros(size):
    rows = rows_of_tokens(torch.full((2, 8), size))
    assert not rows.any()
    assert not restore_rows(rows, 8, torch.float32).any()


@st.composite
def packings(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor | None, np.ndarray, tuple[int, ...]]:
    """Tokens, what is subtracted from them, segments that pack them, and the buffer's shape."""
    rng = np.random.default_rng(draw(SEEDS))
    batch, heads, width = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 8, 23, 64]))
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


@given(packings(), st.booleans())
@examples(60)
def test_segments_are_rounded_and_nothing_else_is_touched(case, by_triton):
    tokens, less, columns, shape = case
    if by_triton:
        pytest.importorskip("triton")
        from dbsp_kernels.triton.exchange import triton_quantise_segments

        if torch.cuda.is_available():
            pytest.skip("there is a GPU, on which tests/kernels/test_on_gpu.py runs the kernel")
    buffer = torch.full(shape[2:3] + shape[:1] + shape[3:], 12345, dtype=torch.int32).transpose(0, 1)[:, None]
    expected = buffer.clone()
    for head, token, _, to, length, _ in columns.tolist():
        values = tokens[:, head, token : token + length].float()
        values = values if less is None else values - less[:, head, None]
        expected[:, 0, to : to + length] = rows_of_tokens(values) if length else 0
    segments = CopySegments.from_columns(columns, torch.device("cpu"))
    if by_triton:
        with interpreted():
            triton_quantise_segments(tokens, buffer, segments.table, segments.mean, less)
    else:
        quantise_segments(tokens, buffer, segments, less)
    assert buffer.equal(expected)
