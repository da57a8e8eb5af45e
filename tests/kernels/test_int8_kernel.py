"""Kernel `triton-int8` in Triton's interpreter, against float64 attention of the rounded queries and keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels import BackwardInputs, KernelInputs, block_attention_backward, choose_kernel
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error, rounded_to_int8
from tests.kernels.test_triton import LOOPS, MOST_ERROR, interpreter, three_parts, tiles  # noqa: F401  a fixture
from tests.support.generators import SEEDS, examples

pytestmark = pytest.mark.usefixtures("interpreter")


def assert_right(p: Packed, scale: float | None = None, **options) -> None:
    """Compares `triton-int8` with attention of the same rounded numbers: 1e-5 in float32."""
    from dbsp_kernels.triton.forward import triton_int8_attention

    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    kv_full = options.pop("kv_full", None)
    out, lse = triton_int8_attention(KernelInputs(*vars(p).values(), scale, kv_full), **options)
    expected, expected_lse = rounded_to_int8(p).attend("reference", scale)
    assert (out.dtype, out.shape, lse.dtype) == (p.q.dtype, p.q.shape, torch.float32)
    assert relative_error(out, expected) <= (1e-5 if p.q.dtype == torch.float32 else MOST_ERROR[p.q.dtype])
    some = p.kv_count > 0
    torch.testing.assert_close(lse[some].double(), expected_lse[some], rtol=1e-5, atol=1e-5)
    assert (out[~some] == 0).all()
    assert torch.isneginf(lse[~some]).all()


@given(
    rows=st.integers(0, 4),
    blocks=st.integers(1, 4),
    block_q=st.integers(1, 40),
    block_k=st.integers(1, 40),
    width=st.integers(1, 40),
    dtype=st.sampled_from(list(MOST_ERROR)),
    hint=st.booleans(),
    loop=st.sampled_from(LOOPS),
    use_tma=st.booleans(),
    seed=SEEDS,
)
@examples(40)
def test_any_shape_equals_attention_of_the_rounded_numbers(hint, loop, use_tma, **shape):
    p = kinder(packed(**shape))
    assert_right(p, kv_full=full_counts(p) if hint else None, tiles=tiles(p, loop), use_tma=use_tma)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 3.0])
def test_any_scale(scale):
    assert_right(packed(block_q=16, block_k=16), scale)


def test_blocks_of_128_equal_attention_of_the_rounded_numbers():
    p = kinder(packed(rows=3, blocks=4, block_q=128, block_k=128, width=128, seed=4))
    assert 0 < full_counts(p).sum() < p.kv_count.sum(), "full blocks and short ones"
    assert_right(p, kv_full=full_counts(p))


def test_inputs_that_are_not_contiguous():
    p = packed(rows=4, block_q=16, block_k=16)
    for dims in ((0, 1), (1, 2)):
        q, k, v = (t.transpose(*dims).contiguous().transpose(*dims) for t in (p.q, p.k, p.v))
        assert not any(t.is_contiguous() for t in (q, k, v))
        assert_right(replace(p, q=q, k=k, v=v), use_tma=True)


def test_rounding_is_what_sets_it_apart():
    """Without it, the comparison above would fail: the error is that of int8, and no more."""
    p = packed(rows=6, block_q=16, block_k=16, width=64)
    out, lse = p.attend("triton-int8")
    exact, exact_lse = p.exact()
    some = p.kv_count > 0
    assert 1e-3 < relative_error(out, exact) < 2e-2
    assert 1e-4 < (lse - exact_lse)[some].abs().max() < 5e-2


@pytest.mark.parametrize("use_tma", [True, False])
def test_what_lies_beyond_short_blocks_is_not_seen_even_if_not_finite(use_tma):
    p = kinder(packed(blocks=6, block_q=16, block_k=16, width=32))
    k, v = p.k.clone(), p.v.clone()
    for block, n in enumerate(p.kv_len.tolist()):
        k[block, n:], v[block, n:] = torch.nan, torch.inf
    assert_right(replace(p, k=k, v=v), kv_full=full_counts(p), use_tma=use_tma)


def test_queries_and_keys_of_zeros_and_next_to_nothing_give_the_mean_of_values():
    p = packed(rows=4, block_q=16, block_k=16)
    for q, k in ((p.q * 0, p.k), (p.q, p.k * 0), (p.q * 2.0**-90, p.k * 2.0**-90)):
        assert_right(replace(p, q=q, k=k))


@pytest.mark.parametrize("name", ["q", "k"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_number_that_is_not_finite_makes_what_it_reaches_nan(name, value):
    p = packed(rows=2, blocks=2, block_q=16, block_k=16)
    index, count = torch.tensor([[0, 1], [1, -7]]).int(), torch.tensor([2, 1]).int()
    broken = getattr(p, name).clone()
    broken[0, 0, 3] = value  # of row 0's first query, or of block 0, which row 0 alone attends to
    out, lse = replace(p, kv_index=index, kv_count=count, **{name: broken}).attend("triton-int8")
    reached = torch.zeros(2, 16, dtype=torch.bool)
    reached[0, : 1 if name == "q" else 16] = True
    assert torch.equal(out.isnan().all(-1), reached)
    assert torch.equal(lse.isnan(), reached)


@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
def test_parts_in_any_order_give_the_whole(dtype):
    p, parts = three_parts(dtype)
    expected, expected_lse = rounded_to_int8(p).attend("reference")
    some = p.kv_count > 0
    for first, second, third in itertools.permutations(parts):
        partial = first.attend("triton-int8", out_dtype=torch.float32)
        assert all(map(torch.Tensor.is_set_to, second.attend("triton-int8", partial=partial), partial)), "in place"
        out, lse = third.attend("triton-int8", partial=partial, out_dtype=dtype)
        assert relative_error(out, expected) <= max(1e-5, MOST_ERROR[dtype])
        torch.testing.assert_close(lse[some].double(), expected_lse[some], rtol=1e-5, atol=1e-5)
        assert (out[~some] == 0).all()
        assert torch.isneginf(lse[~some]).all()


def test_backward_raises():
    p = packed(block_q=16, block_k=16)
    out, lse = p.attend("triton-int8")
    inputs = BackwardInputs(KernelInputs(*vars(p).values(), 0.25), out, out, lse, lambda: (p.kv_index, p.kv_count))
    with pytest.raises(ValueError, match="'triton-int8' cannot be used here: it has no backward"):
        block_attention_backward(inputs, "triton-int8")
    with pytest.raises(ValueError, match="kernel 'triton-int8' has no backward"):
        block_attention_backward(inputs, choose_kernel("triton-int8", "cpu", torch.float32))
