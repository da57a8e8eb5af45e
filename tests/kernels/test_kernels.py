"""Kernels on packed blocks against attention written out in float64, and what the registry rejects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels import (
    KERNELS,
    Kernel,
    KernelRequirements,
    available,
    choose_kernel,
    merge_states,
    require_supported,
)
from dbsp_kernels.backends import cpu
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, written_out
from tests.support.generators import SEEDS, examples

each_kernel = pytest.mark.parametrize("kernel", [name for name, one in KERNELS.items() if "cpu" in one.devices])
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


def assert_right(p: Packed, kernel: str, scale: float | None = None) -> None:
    out, lse = p.attend(kernel, scale)
    expected, expected_lse = written_out(p, scale)
    assert (out.dtype, out.shape) == (p.q.dtype, p.q.shape)
    wide = torch.float64 if p.q.dtype == torch.float64 else torch.float32
    assert (lse.dtype, lse.shape) == (wide, p.q.shape[:2])
    tolerance = TOLERANCES[p.q.dtype]
    torch.testing.assert_close(out.double(), expected, **tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=max(1e-5, tolerance["atol"]))
    empty = p.kv_count == 0
    assert (out[empty] == 0).all()
    assert torch.isneginf(lse[empty]).all()


class TestAttention:
    @each_kernel
    @given(
        rows=st.integers(0, 6),
        blocks=st.integers(1, 7),
        block_q=st.integers(1, 20),
        block_k=st.integers(1, 20),
        head_dim=st.sampled_from([1, 8, 24, 33]),
        seed=SEEDS,
    )
    @examples(40)
    def test_any_shape(self, kernel, **shape):
        assert_right(packed(**shape), kernel)

    @each_kernel
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    def test_any_dtype_and_scale(self, kernel, dtype):
        for scale in (None, 0.0, 2.0):
            assert_right(packed(rows=8, block_q=16, block_k=16, head_dim=32, dtype=dtype), kernel, scale)

    @each_kernel
    def test_no_blocks_give_zeros(self, kernel):
        p = packed()
        tables = {"kv_index": p.kv_index[:, :0], "kv_count": torch.zeros_like(p.kv_count), "kv_len": p.kv_len[:0]}
        out, lse = replace(p, k=p.k[:0], v=p.v[:0], **tables).attend(kernel)
        assert not out.any()
        assert torch.isneginf(lse).all()

    @each_kernel
    def test_inputs_that_are_not_contiguous(self, kernel):
        p = packed(rows=6, block_q=5, block_k=7, head_dim=8)
        q, k, v = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (p.q, p.k, p.v))
        index = p.kv_index.T.contiguous().T
        assert not any(t.is_contiguous() for t in (q, k, v, index))
        assert_right(replace(p, q=q, k=k, v=v, kv_index=index), kernel)

    def test_rows_of_one_length_split_over_several_gathers(self, monkeypatch):
        p = replace(packed(rows=9), kv_count=torch.full((9,), 3, dtype=torch.int32))
        p = replace(p, kv_index=torch.arange(27, dtype=torch.int32).reshape(9, 3) % 6)
        whole = p.attend("cpu")
        for limit in (2 * 3 * 4 * 16 * 4, 1):
            monkeypatch.setattr(cpu, "GATHER_BYTES", limit)
            torch.testing.assert_close(p.attend("cpu"), whole)


def mangled(**changes):
    p = packed(rows=5, blocks=6)
    return replace(p, **{name: change(getattr(p, name)) for name, change in changes.items()})


def with_entry(value):
    def change(table):
        table = table.clone()
        table.view(-1)[0] = value
        return table

    return change


def full(table):
    return torch.full_like(table, 6)


def partial(rows):
    return torch.zeros(rows, 8, 16), torch.full((rows, 8), -torch.inf)


MISTAKES = {
    "keys unlike values": (mangled(v=lambda v: v[:-1]), "expected q"),
    "an index for other rows": (mangled(kv_index=lambda t: t[:-1]), r"expected kv_index int32\[5, "),
    "lengths for other blocks": (mangled(kv_len=lambda t: t[:-1]), r"kv_len int32\[6\]"),
    "int64 counts": (mangled(kv_count=lambda t: t.long()), "expected .* int32.* got torch.int64"),
    "values of another dtype": (mangled(v=lambda v: v.half()), "share a dtype"),
    "keys on another device": (mangled(k=lambda k: k.to("meta")), "on one device"),
    "a negative count": (mangled(kv_count=with_entry(-1)), "between 0 and the table's width 6"),
    "a length of zero": (mangled(kv_len=with_entry(0)), "between 1 and block_k = 4"),
    "an index beyond the blocks": (mangled(kv_count=full, kv_index=lambda t: full(t)), "between 0 and 5"),
    "a schedule for other rows": (mangled(), r"row_schedule int32\[5\]", {"row_schedule": torch.arange(4).int()}),
    "a schedule that names a row twice": (mangled(), "5 rows once", {"row_schedule": torch.zeros(5).int()}),
    "more full blocks than blocks": (mangled(), "first kv_full entries", {"kv_full": torch.full((5,), 7).int()}),
    "full blocks that are short": (
        mangled(kv_count=torch.ones_like, kv_index=torch.zeros_like, kv_len=torch.ones_like),
        "first kv_full entries",
        {"kv_full": torch.ones(5).int()},
    ),
    "a partial result of other rows": (mangled(), "partial must be", {"partial": partial(4)}),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_bad_input_raises(mistake):
    p, message, *options = mistake
    with pytest.raises(ValueError, match=message):
        p.attend("cpu", **(options[0] if options else {}))


@each_kernel
def test_hints_that_are_true_change_nothing(kernel):
    p = kinder(packed(seed=1))
    assert full_counts(p).any()
    schedule = torch.tensor([4, 2, 0, 1, 3]).int()
    hinted = p.attend(kernel, kv_full=full_counts(p), row_schedule=schedule)
    assert all(map(torch.equal, hinted, p.attend(kernel)))


class TestMerge:
    def test_merging_two_empty_sides_gives_nothing(self):
        nothing = torch.zeros(4, 8, 16), torch.full((4, 8), -torch.inf)
        assert all(map(torch.equal, merge_states(*nothing, *nothing), nothing))

    def test_large_scores_do_not_overflow(self):
        out, part = torch.zeros(1, 1, 2), torch.ones(1, 1, 2, dtype=torch.bfloat16)
        merged, lse = merge_states(out, torch.tensor([[1000.0]]), part, torch.tensor([[1000.0]]))
        assert (merged.dtype, merged.tolist()) == (torch.float32, [[[0.5, 0.5]]])
        assert lse.item() == pytest.approx(1000 + np.log(2))


class TestRegistry:
    @pytest.fixture(autouse=True)
    def the_two_that_work_anywhere(self, monkeypatch):
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        every = dict(KERNELS)
        for name in KERNELS.keys() - {"cpu", "reference"}:
            del KERNELS[name]
        yield
        KERNELS.clear()  # and not one by one: their order counts
        KERNELS.update(every)

    def test_kernel_without_its_operator_is_unavailable(self, monkeypatch):
        broken = replace(KERNELS["cpu"], why_unavailable=lambda: "no operator here")
        monkeypatch.setitem(KERNELS, "cpu", broken)
        assert available("cpu", torch.float32) == ["reference"]
        assert choose_kernel("auto", "cpu", torch.float32).name == "reference"
        with pytest.raises(ValueError, match="'cpu' cannot be used here: no operator here; use reference"):
            choose_kernel("cpu", "cpu", torch.float32)

    def test_environment_decides_for_auto_alone(self, monkeypatch):
        def run(inputs):
            return inputs.q + 1, inputs.q[..., 0]

        p = packed()
        expected, chosen = p.attend("cpu"), choose_kernel("auto", "cpu", torch.float32)
        monkeypatch.setitem(KERNELS, "plus one", Kernel(name="plus one", run=run, devices=frozenset({"cpu"})))
        monkeypatch.setenv("DBSP_KERNEL", "plus one")
        assert torch.equal(p.attend("auto")[0], p.q + 1)
        for kernel in (chosen, "cpu"):
            assert all(map(torch.equal, p.attend(kernel), expected))

    def test_unknown_kernel_raises_with_those_that_exist(self, monkeypatch):
        monkeypatch.setenv("DBSP_KERNEL", "fast")
        for name, what in (("auto", "DBSP_KERNEL"), ("fast", "kernel")):
            with pytest.raises(ValueError, match=f"unknown {what} 'fast'; use one of auto, cpu, reference"):
                choose_kernel(name, "cpu", torch.float32)


class TestCapabilities:
    def test_sparge_is_never_chosen_by_itself(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setitem(KERNELS, "sparge", replace(KERNELS["sparge"], why_unavailable=lambda: None))
        monkeypatch.setitem(KERNELS, "triton", replace(KERNELS["triton"], why_unavailable=lambda: "none here"))
        assert available("cuda", torch.bfloat16) == ["reference", "sparge"]
        with pytest.raises(ValueError, match=r"\(triton: none here\); use reference or sparge$"):
            choose_kernel("auto", "cuda", torch.bfloat16, KernelRequirements((128, 64), 128))

    @pytest.mark.parametrize(
        ("needs", "message"),
        [
            (KernelRequirements(lse=True), r"returns no log-sum-exp.*use cpu or triton or reference or fa4"),
            (KernelRequirements(ragged_rows=True), r"only whole heads.*use cpu or triton or reference or fa4"),
            (KernelRequirements(head_dim=512), r"head dims 64 or 128, got 512; use cpu or reference"),
            (KernelRequirements(tokens=100), r"at least 128 tokens per head, got 100; use cpu or triton"),
        ],
    )
    def test_plan_that_a_kernel_never_supports_is_rejected(self, monkeypatch, needs, message):
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        with pytest.raises(ValueError, match=f"kernel 'sparge' does not support this plan: .*{message}"):
            require_supported("sparge", needs)
        require_supported("auto", needs)
        require_supported("sparge", KernelRequirements(blocks=(128, 64), head_dim=128))
        monkeypatch.setenv("DBSP_KERNEL", "sparge")
        with pytest.raises(ValueError, match="kernel 'sparge' does not support this plan"):
            require_supported("auto", needs)
