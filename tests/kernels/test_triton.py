"""Kernels `triton` and `triton-int8`, interpreted, against float64 attention; for int8, of rounded inputs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels import KernelInputs, choose_kernel, merge_states
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error, rounded_to_int8
from tests.support.generators import SEEDS, examples

pytest.importorskip("triton")
from dbsp_kernels.triton.forward import triton_attention, triton_int8_attention
from dbsp_kernels.triton.merge import triton_merge_into
from dbsp_kernels.triton.tiles import HOPPER, Tiles, padded, tiles_for

LOOPS = ("plain", "late", "scale_first", "halves")
MIXES = list(itertools.product((64, 128), repeat=2))
ANY_ORDER = torch.tensor([[2, 0, 3, -7], [-7, -7, -7, -7], [1, 3, 0, 2]]).int()
MOST_ERROR = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
MOST_ERROR_OF_INT8 = MOST_ERROR | {torch.float32: 1e-5}
DTYPES = list(MOST_ERROR)
each_kernel = pytest.mark.parametrize("kernel", ["triton", "triton-int8"])


def expected_of(p: Packed, kernel: str, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns output and log-sum-exp in float64, of q and k as the kernel multiplies them."""
    return rounded_to_int8(p).attend("reference", scale) if kernel == "triton-int8" else p.exact(scale)


def most_error(kernel: str, dtype: torch.dtype) -> float:
    return (MOST_ERROR_OF_INT8 if kernel == "triton-int8" else MOST_ERROR)[dtype]


def assert_right(
    p: Packed, kernel: str = "triton", scale: float | None = None, kv_full: torch.Tensor | None = None, **options
) -> None:
    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    run = triton_int8_attention if kernel == "triton-int8" else triton_attention
    out, lse = run(KernelInputs(*vars(p).values(), scale, kv_full), **options)
    expected, expected_lse = expected_of(p, kernel, scale)
    assert (out.dtype, out.shape, lse.dtype) == (p.q.dtype, p.q.shape, torch.float32)
    assert relative_error(out, expected) <= most_error(kernel, p.q.dtype)
    some, near = p.kv_count > 0, 1e-5 if kernel == "triton-int8" else 2e-5
    torch.testing.assert_close(lse[some].double(), expected_lse[some].double(), rtol=near, atol=near)
    assert (out[~some] == 0).all()
    assert torch.isneginf(lse[~some]).all()


def assert_twice_is_merged(p: Packed, kv_full: torch.Tensor, **options) -> None:
    """Checks that an attention merged with itself has the same output, and twice the sum of weights."""
    inputs = KernelInputs(*vars(p).values(), p.q.shape[-1] ** -0.5, kv_full)
    out, lse = (t.clone() for t in triton_attention(inputs, **options))
    twice, twice_lse = triton_attention(replace(inputs, partial=(out.clone(), lse.clone())), **options)
    torch.testing.assert_close(twice, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(twice_lse, lse + torch.log(torch.tensor(2.0)), rtol=1e-5, atol=1e-5)


def tiles(p: Packed, loop: str) -> Tiles:
    """Returns Hopper's tiles with this loop; head dims of 16 and less have no halves that can be multiplied."""
    _, block_q, head_dim = p.q.shape
    if loop == "halves" and padded(head_dim) < 32:
        loop = "plain"
    return replace(tiles_for(block_q, p.k.shape[1], head_dim, p.q.dtype, HOPPER), loop=loop)


@pytest.mark.usefixtures("interpreter")
class TestBothKernels:
    @each_kernel
    @given(
        rows=st.integers(0, 4),
        blocks=st.integers(1, 4),
        block_q=st.integers(1, 40),
        block_k=st.integers(1, 40),
        head_dim=st.integers(1, 40),
        dtype=st.sampled_from(DTYPES),
        hint=st.booleans(),
        loop=st.sampled_from(LOOPS),
        use_tma=st.booleans(),
        seed=SEEDS,
    )
    @examples(40)
    def test_any_shape_equals_float64(self, kernel, hint, loop, use_tma, **shape):
        p = kinder(packed(**shape))
        assert_right(p, kernel, kv_full=full_counts(p) if hint else None, tiles=tiles(p, loop), use_tma=use_tma)

    @each_kernel
    @pytest.mark.parametrize(("use_tma", "loop"), [(True, "plain"), (True, "halves"), (False, "late")])
    def test_tokens_beyond_short_blocks_are_not_read_even_if_not_finite(self, kernel, use_tma, loop):
        p = kinder(packed(blocks=6, block_q=16, block_k=16, head_dim=32))
        k, v = p.k.clone(), p.v.clone()
        for block, n in enumerate(p.kv_len.tolist()):
            k[block, n:], v[block, n:] = torch.nan, torch.inf
        p = replace(p, k=k, v=v)
        assert_right(p, kernel, kv_full=full_counts(p), use_tma=use_tma, tiles=tiles(p, loop))

    @pytest.mark.parametrize(
        ("kernel", "dtype"),
        [*((k, DTYPES[n]) for n, k in enumerate(("triton", "cpu", "reference"))), ("triton-int8", torch.bfloat16)],
        ids=str,
    )
    def test_parts_in_any_order_give_the_whole(self, kernel, dtype):
        p, parts = three_parts(dtype)
        expected, expected_lse = expected_of(p, kernel)
        some, near = p.kv_count > 0, 1e-5 if kernel == "triton-int8" else max(1e-5, MOST_ERROR[dtype])
        for first, second, third in itertools.permutations(parts):
            partial = first.attend(kernel, out_dtype=torch.float32)
            assert partial[0].dtype == torch.float32
            assert all(map(torch.Tensor.is_set_to, second.attend(kernel, partial=partial), partial)), "in place"
            out, lse = third.attend(kernel, partial=partial, out_dtype=dtype)
            assert out.dtype == dtype
            assert relative_error(out, expected) <= most_error(kernel, dtype)
            torch.testing.assert_close(lse[some].double(), expected_lse[some].double(), rtol=1e-5, atol=near)
            assert (out[~some] == 0).all()
            assert torch.isneginf(lse[~some]).all()


def three_parts(dtype: torch.dtype) -> tuple[Packed, list[Packed]]:
    """Returns an attention, and three with a third of its blocks each, with rows empty in some parts, or in all."""
    p = packed(rows=6, blocks=7, block_q=16, block_k=16, dtype=dtype)
    index = torch.stack([torch.arange(7).roll(row) for row in range(6)]).int()
    p = replace(p, kv_index=index, kv_count=torch.tensor([0, 1, 2, 7, 3, 5]).int())
    parts = []
    for part in range(3):
        used = ((torch.arange(7) % 3 == part) & (torch.arange(7) < p.kv_count[:, None])).int()
        order = torch.argsort(1 - used, dim=1, stable=True)
        parts.append(replace(p, kv_index=p.kv_index.gather(1, order), kv_count=used.sum(1).int()))
    assert all(((part.kv_count == 0) & (p.kv_count > 0)).any() for part in parts[1:])
    return p, parts


@pytest.mark.usefixtures("interpreter")
class TestTriton:
    @pytest.mark.parametrize(("mix", "loop"), [(n % 4, LOOPS[(n + n // 4) % 4]) for n in range(8)])
    def test_every_mix_of_blocks_equals_float64(self, mix, loop):
        (block_q, block_k), dtype = MIXES[mix], DTYPES[(mix + LOOPS.index(loop)) % 3]
        p = packed(rows=3, blocks=4, block_q=block_q, block_k=block_k, head_dim=64, dtype=dtype, seed=4)
        p = kinder(replace(p, kv_index=ANY_ORDER, kv_count=torch.tensor([3, 0, 4]).int()))
        assert 0 < full_counts(p).sum() < p.kv_count.sum(), "full blocks and short ones"
        assert_right(p, kv_full=full_counts(p), tiles=tiles(p, loop))

    @given(
        counts=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=4),
        steps=st.sampled_from([1, 2, 4]),
        loop=st.sampled_from(LOOPS),
        use_tma=st.booleans(),
        seed=SEEDS,
    )
    @examples(20)
    def test_every_loop_over_any_number_of_full_blocks_equals_float64(self, counts, steps, loop, use_tma, seed):
        """Tries rows of `counts` full and short blocks, in random order each, a block in one step or several."""
        p = packed(rows=len(counts), blocks=6, block_q=16, block_k=64, head_dim=32, seed=seed)
        p = replace(p, k=p.k.clamp(-3, 3), v=p.v.clamp(-3, 3))
        length = torch.tensor([64, 64, 64, 64, 7, 33]).int()
        order = torch.Generator().manual_seed(seed)

        def entries(full: int) -> torch.Tensor:
            short = 4 + torch.randperm(2, generator=order)
            return torch.cat([torch.randperm(4, generator=order)[:full], short, torch.full((6,), -7)])[:6]

        index = torch.stack([entries(full) for full, _ in counts])
        p = replace(p, kv_index=index.int(), kv_count=torch.tensor([sum(of) for of in counts]).int(), kv_len=length)
        full = torch.tensor([full for full, _ in counts]).int()
        options = {"tiles": Tiles(16, 64 // steps, 4, 3, loop), "use_tma": use_tma}
        assert_right(p, kv_full=full, **options)
        assert_twice_is_merged(p, full, **options)

    def test_blocks_larger_than_tiles_equal_float64(self):
        p = kinder(packed(rows=3, blocks=3, block_q=96, block_k=64, head_dim=16))
        for hint, use_tma in ((full_counts(p), True), (None, False)):
            assert_right(p, tiles=Tiles(32, 16, warps=4, stages=2), kv_full=hint, use_tma=use_tma)

    @pytest.mark.parametrize(
        ("loop", "use_tma", "keys"), [*zip(LOOPS, (True, False, True, False), (16, 32, 64, 16), strict=True)]
    )
    def test_full_blocks_that_tiles_do_not_divide_are_read_to_their_end_alone(self, use_tma, loop, keys):
        """Checks that keys behind a block in memory are not read, by making them not finite."""
        p = packed(rows=3, blocks=5, block_q=24, block_k=40, head_dim=32, dtype=torch.float16)
        index, count = torch.tensor([[2, 0, 4], [0, 2, 4], [2, -7, -7]]).int(), torch.tensor([3, 2, 1]).int()
        k, v, length = p.k.clone(), p.v.clone(), torch.tensor([40, 40, 40, 40, 17]).int()
        k[1::2], v[1::2] = torch.nan, torch.inf
        k[4, 17:], v[4, 17:] = torch.nan, torch.inf
        p = replace(p, k=k, v=v, kv_index=index, kv_count=count, kv_len=length)
        options = {"tiles": Tiles(16, keys, 4, 3, loop), "use_tma": use_tma}
        assert_right(p, kv_full=torch.tensor([2, 2, 1]).int(), **options)

    @pytest.mark.parametrize("kernel", [triton_attention, triton_int8_attention])
    def test_output_scaled_before_the_first_product_has_identical_bits(self, kernel):
        p = kinder(packed(rows=3, blocks=4, block_q=64, block_k=48, head_dim=40, dtype=torch.float16))
        inputs = KernelInputs(*vars(p).values(), 40**-0.5, full_counts(p))
        late, scale_first = (kernel(inputs, Tiles(64, 32, 4, 3, loop)) for loop in ("late", "scale_first"))
        assert all(map(torch.equal, late, scale_first))

    @given(
        rows=st.integers(0, 3),
        tokens=st.integers(1, 40),
        head_dim=st.integers(1, 80),
        dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
        seed=SEEDS,
    )
    @examples(20)
    def test_merge_kernel_equals_merge_states(self, rows, tokens, head_dim, dtypes, seed):
        generator = torch.Generator().manual_seed(seed)
        sides = []
        for dtype in dtypes:
            out = torch.randn(rows, tokens, head_dim, generator=generator)
            lse = torch.randn(rows, tokens, generator=generator) * 30
            empty = torch.rand(rows, tokens, generator=generator) < 0.4
            sides += [out.masked_fill(empty[..., None], 0).to(dtype), lse.masked_fill(empty, -torch.inf)]
        expected, expected_lse = merge_states(*sides)
        out, lse = (torch.stack((one, one), dim=1)[:, 0] for one in sides[:2])  # rows apart, as those of a head
        triton_merge_into(out, lse, *sides[2:])
        tolerance = 1e-5 if out.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse, expected_lse)


@pytest.mark.usefixtures("interpreter")
class TestTritonInt8:
    def test_blocks_of_128_equal_attention_of_rounded_inputs(self):
        p = kinder(packed(rows=3, blocks=4, block_q=128, block_k=128, head_dim=128, seed=4))
        assert 0 < full_counts(p).sum() < p.kv_count.sum(), "full blocks and short ones"
        assert_right(p, "triton-int8", kv_full=full_counts(p))

    def test_error_against_unrounded_inputs_is_that_of_int8(self):
        """Shows that the comparisons above can fail."""
        p = packed(rows=6, block_q=16, block_k=16, head_dim=64)
        out, lse = p.attend("triton-int8")
        exact, exact_lse = p.exact()
        some = p.kv_count > 0
        assert 1e-3 < relative_error(out, exact) < 2e-2
        assert 1e-4 < (lse - exact_lse)[some].abs().max() < 5e-2

    def test_queries_and_keys_near_zero_give_the_mean_of_values(self):
        p = packed(rows=4, block_q=16, block_k=16)
        for q, k in ((p.q * 0, p.k), (p.q, p.k * 0), (p.q * 2.0**-90, p.k * 2.0**-90)):
            assert_right(replace(p, q=q, k=k), "triton-int8")

    @pytest.mark.parametrize("name", ["q", "k"])
    @pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
    def test_number_that_is_not_finite_makes_the_rows_that_read_it_nan(self, name, value):
        p = packed(rows=2, blocks=2, block_q=16, block_k=16)
        index, count = torch.tensor([[0, 1], [1, -7]]).int(), torch.tensor([2, 1]).int()
        broken = getattr(p, name).clone()
        broken[0, 0, 3] = value  # of row 0's first query, or of block 0, which row 0 alone attends to
        out, lse = replace(p, kv_index=index, kv_count=count, **{name: broken}).attend("triton-int8")
        reached = torch.zeros(2, 16, dtype=torch.bool)
        reached[0, : 1 if name == "q" else 16] = True
        assert torch.equal(out.isnan().all(-1), reached)
        assert torch.equal(lse.isnan(), reached)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_a_gpu_raises_and_names_other_kernels(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match=r"kernel 'triton' cannot be used here: .*; use cpu or reference"):
        choose_kernel("triton", "cpu", torch.float32)
