"""Kernels on packed blocks against attention written out in float64, and what the registry refuses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_kernels import KERNELS, Kernel, available, block_attention, choose_kernel, cpu, merge_states
from generators import SEEDS, examples

each_kernel = pytest.mark.parametrize("kernel", ["reference", "cpu"])
TOLERANCES = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-10},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
    torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2},
}


@dataclass(frozen=True)
class Packed:
    """The arguments of `block_attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor

    def attend(self, kernel: str, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        tables = (self.kv_index, self.kv_count, self.kv_len)
        return block_attention(self.q, self.k, self.v, *tables, scale=scale, kernel=kernel)


def packed(rows=5, blocks=6, block_q=8, block_k=4, width=16, dtype=torch.float32, seed=0) -> Packed:
    """Rows of every length, none at all included; short blocks; rubbish in unused entries and beyond lengths."""
    rng = np.random.default_rng(seed)
    index = rng.permuted(np.tile(np.arange(blocks), (rows, 1)), axis=1)
    count = rng.integers(blocks + 1, size=rows)
    index[np.arange(blocks) >= count[:, None]] = -7
    length = np.where(rng.random(blocks) < 0.5, block_k, rng.integers(1, block_k + 1, size=blocks))
    q, k, v = (
        torch.from_numpy(rng.standard_normal(shape)).to(dtype)
        for shape in ((rows, block_q, width), (blocks, block_k, width), (blocks, block_k, width))
    )
    for block, n in enumerate(length):
        k[block, n:], v[block, n:] = 1e4, -1e4
    return Packed(q, k, v, *(torch.from_numpy(a.astype(np.int32)) for a in (index, count, length)))


def written_out(p: Packed, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, query by query."""
    scale = p.q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (t.double().numpy() for t in (p.q, p.k, p.v))
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, count in enumerate(p.kv_count.tolist()):
        seen = [(b, t) for b in p.kv_index[row, :count].tolist() for t in range(int(p.kv_len[b]))]
        for query in range(q.shape[1]) if seen else ():
            scores = np.array([q[row, query] @ k[b, t] for b, t in seen]) * scale
            weights = np.exp(scores - scores.max())
            lse[row, query] = scores.max() + np.log(weights.sum())
            out[row, query] = (weights / weights.sum()) @ np.array([v[b, t] for b, t in seen])
    return torch.from_numpy(out), torch.from_numpy(lse)


def assert_right(p: Packed, kernel: str, scale: float | None = None) -> None:
    out, lse = p.attend(kernel, scale)
    expected, expected_lse = written_out(p, scale)
    assert (out.dtype, out.shape) == (p.q.dtype, p.q.shape)
    assert (lse.dtype, lse.shape) == (torch.float32, p.q.shape[:2])
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
        width=st.sampled_from([1, 8, 24, 33]),
        seed=SEEDS,
    )
    @examples(80)
    def test_any_shape(self, kernel, **shape):
        assert_right(packed(**shape), kernel)

    @each_kernel
    @pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
    def test_any_dtype(self, kernel, dtype):
        assert_right(packed(rows=8, block_q=16, block_k=16, width=32, dtype=dtype), kernel)

    @each_kernel
    @pytest.mark.parametrize("scale", [0.0, 0.5, 2.0])
    def test_any_scale(self, kernel, scale):
        assert_right(packed(), kernel, scale)

    @each_kernel
    def test_rows_without_blocks_give_zero_and_no_mass(self, kernel):
        p = packed()
        out, lse = replace(p, kv_count=torch.zeros_like(p.kv_count)).attend(kernel)
        assert not out.any()
        assert torch.isneginf(lse).all()

    @each_kernel
    def test_no_blocks_at_all(self, kernel):
        p = packed()
        tables = {"kv_index": p.kv_index[:, :0], "kv_count": torch.zeros_like(p.kv_count), "kv_len": p.kv_len[:0]}
        out, lse = replace(p, k=p.k[:0], v=p.v[:0], **tables).attend(kernel)
        assert not out.any()
        assert torch.isneginf(lse).all()

    @each_kernel
    def test_inputs_that_are_not_contiguous(self, kernel):
        p = packed(rows=6, block_q=5, block_k=7, width=8)
        q, k, v = (t.transpose(0, 2).contiguous().transpose(0, 2) for t in (p.q, p.k, p.v))
        index = p.kv_index.T.contiguous().T
        assert not any(t.is_contiguous() for t in (q, k, v, index))
        assert_right(replace(p, q=q, k=k, v=v, kv_index=index), kernel)

    @each_kernel
    def test_inputs_stay_as_they_were(self, kernel):
        p, untouched = packed(), packed()
        p.attend(kernel)
        assert all(torch.equal(a, b) for a, b in zip(vars(p).values(), vars(untouched).values(), strict=True))

    def test_rows_of_one_length_split_over_several_gathers(self, monkeypatch):
        p = replace(packed(rows=9), kv_count=torch.full((9,), 3, dtype=torch.int32))
        p = replace(p, kv_index=torch.arange(27, dtype=torch.int32).reshape(9, 3) % 6)
        whole = p.attend("cpu")
        calls = []
        monkeypatch.setattr(cpu, "_flash", lambda q, *rest, flash=cpu._flash: calls.append(len(q)) or flash(q, *rest))
        for limit, sizes in ((2 * 3 * 4 * 16 * 4, [2, 2, 2, 2, 1]), (1, [1] * 9)):
            calls.clear()
            monkeypatch.setattr(cpu, "GATHER_BYTES", limit)
            out, lse = p.attend("cpu")
            assert calls == sizes
            torch.testing.assert_close((out, lse), whole)


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


MISTAKES = {
    "q of two dimensions": (mangled(q=lambda q: q[0]), "expected q"),
    "keys of two dimensions": (mangled(k=lambda k: k[0], v=lambda v: v[0]), "expected q"),
    "keys unlike values": (mangled(v=lambda v: v[:-1]), "expected q"),
    "another head width": (mangled(q=lambda q: q[..., :-1]), "expected q"),
    "an index for other rows": (mangled(kv_index=lambda t: t[:-1]), r"expected kv_index \[5, max\]"),
    "an index without width": (mangled(kv_index=lambda t: t[:, 0]), r"expected kv_index \[5, max\]"),
    "counts for other rows": (mangled(kv_count=lambda t: t[:-1]), r"kv_count \[5\]"),
    "lengths for other blocks": (mangled(kv_len=lambda t: t[:-1]), r"kv_len \[6\]"),
    "an int64 index": (mangled(kv_index=lambda t: t.long()), "must be int32"),
    "int64 counts": (mangled(kv_count=lambda t: t.long()), "must be int32"),
    "int64 lengths": (mangled(kv_len=lambda t: t.long()), "must be int32"),
    "values of another dtype": (mangled(v=lambda v: v.half()), "share a dtype"),
    "keys on another device": (mangled(k=lambda k: k.to("meta")), "on one device"),
    "a negative count": (mangled(kv_count=with_entry(-1)), "between 0 and the table's width 6"),
    "a count above the width": (mangled(kv_count=with_entry(7)), "between 0 and the table's width 6"),
    "a length of zero": (mangled(kv_len=with_entry(0)), "between 1 and block_k = 4"),
    "a length above the block": (mangled(kv_len=with_entry(5)), "between 1 and block_k = 4"),
    "an index beyond the blocks": (mangled(kv_count=full, kv_index=lambda t: full(t)), "between 0 and 5"),
    "a negative index": (mangled(kv_count=full, kv_index=lambda t: -torch.ones_like(t)), "between 0 and 5"),
}


@each_kernel
@pytest.mark.parametrize(("p", "complaint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_raises(kernel, p, complaint):
    with pytest.raises(ValueError, match=complaint):
        p.attend(kernel)


class TestMerge:
    @staticmethod
    def parts(seed: int, count: int) -> tuple[Packed, list[tuple[torch.Tensor, torch.Tensor]]]:
        """An attention, and the partial results of its blocks dealt out to `count` parts, some without any."""
        p = packed(rows=6, seed=seed)
        part_of = torch.from_numpy(np.random.default_rng(seed).integers(count, size=p.kv_index.shape))
        results = []
        for part in range(count):
            used = (part_of == part) & (torch.arange(6) < p.kv_count[:, None])
            order = torch.argsort(~used, dim=1, stable=True)
            tables = {"kv_index": p.kv_index.gather(1, order), "kv_count": used.sum(1).int()}
            results.append(replace(p, **tables).attend("reference"))
        return p, results

    @given(SEEDS)
    @examples(20)
    def test_parts_in_any_order_give_the_whole(self, seed):
        p, results = self.parts(seed, 3)
        whole = p.attend("reference")
        for first, second, third in itertools.permutations(results):
            torch.testing.assert_close(merge_states(*merge_states(*first, *second), *third), whole)

    @given(SEEDS)
    @examples(20)
    def test_is_associative(self, seed):
        _, (a, b, c) = self.parts(seed, 3)
        left, right = merge_states(*merge_states(*a, *b), *c), merge_states(*a, *merge_states(*b, *c))
        torch.testing.assert_close(left, right)

    def test_a_side_that_saw_nothing_changes_nothing(self):
        out, lse = torch.randn(4, 8, 16), torch.randn(4, 8) * 50
        nothing = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
        assert all(map(torch.equal, merge_states(out, lse, *nothing), (out, lse)))
        assert all(map(torch.equal, merge_states(*nothing, out, lse), (out, lse)))

    def test_two_sides_that_saw_nothing_give_nothing(self):
        nothing = torch.zeros(4, 8, 16), torch.full((4, 8), -torch.inf)
        assert all(map(torch.equal, merge_states(*nothing, *nothing), nothing))

    def test_large_scores_do_not_overflow(self):
        out, part = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        merged, lse = merge_states(out, torch.tensor([[1000.0]]), part, torch.tensor([[1000.0]]))
        assert merged.tolist() == [[[0.5, 0.5]]]
        assert lse.item() == pytest.approx(1000 + np.log(2))

    def test_keeps_the_dtype_of_what_is_accumulated(self):
        lse = torch.zeros(1, 1)
        for dtype, part_dtype in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
            merged, _ = merge_states(
                torch.zeros(1, 1, 2, dtype=dtype), lse, torch.ones(1, 1, 2, dtype=part_dtype), lse
            )
            assert merged.dtype == dtype


class TestRegistry:
    @pytest.fixture(autouse=True)
    def the_two_that_work_anywhere(self, monkeypatch):
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        for name in KERNELS.keys() - {"cpu", "reference"}:
            monkeypatch.delitem(KERNELS, name)

    def test_available_lists_what_can_serve_best_first(self):
        assert available("cpu") == ["cpu", "reference"]
        assert available("cuda") == ["reference"]
        assert available("cpu", torch.int8) == []

    def test_a_kernel_that_misses_something_is_not_available(self, monkeypatch):
        broken = replace(KERNELS["cpu"], missing=lambda: "no operator here")
        monkeypatch.setitem(KERNELS, "cpu", broken)
        assert available("cpu") == ["reference"]
        assert choose_kernel("auto", "cpu", torch.float32).name == "reference"
        with pytest.raises(ValueError, match="'cpu' cannot be used here: no operator here; use reference"):
            choose_kernel("cpu", "cpu", torch.float32)

    def test_auto_takes_the_best_and_a_name_takes_that_one(self):
        assert choose_kernel("auto", "cpu", torch.float32).name == "cpu"
        assert choose_kernel("auto", "cuda", torch.bfloat16).name == "reference"
        assert choose_kernel("reference", "cpu", torch.float32).name == "reference"

    def test_the_environment_decides_for_auto_and_only_for_auto(self, monkeypatch):
        monkeypatch.setenv("DBSP_KERNEL", "reference")
        assert choose_kernel("auto", "cpu", torch.float32).name == "reference"
        assert choose_kernel("cpu", "cpu", torch.float32).name == "cpu"

    def test_block_attention_runs_the_kernel_of_the_environment(self, monkeypatch):
        def run(q, *rest):
            return q + 1, q[..., 0]

        monkeypatch.setitem(KERNELS, "plus one", Kernel("plus one", run, frozenset({"cpu"})))
        monkeypatch.setenv("DBSP_KERNEL", "plus one")
        p = packed()
        assert torch.equal(p.attend("auto")[0], p.q + 1)

    def test_an_empty_environment_variable_is_as_good_as_none(self, monkeypatch):
        monkeypatch.setenv("DBSP_KERNEL", "")
        assert choose_kernel("auto", "cpu", torch.float32).name == "cpu"

    @pytest.mark.parametrize("through_environment", [True, False])
    def test_an_unknown_kernel_raises_and_names_those_there_are(self, monkeypatch, through_environment):
        monkeypatch.setenv("DBSP_KERNEL", "fast")
        with pytest.raises(ValueError, match="unknown kernel 'fast'; use auto or one of cpu, reference"):
            choose_kernel("auto" if through_environment else "fast", "cpu", torch.float32)

    def test_a_kernel_that_cannot_serve_the_device_raises_and_names_one_that_can(self):
        with pytest.raises(
            ValueError, match="'cpu' cannot be used here: it runs on cpu, the tensors are on cuda; use r"
        ):
            choose_kernel("cpu", "cuda", torch.float32)

    @pytest.mark.parametrize("name", ["cpu", "auto"])
    def test_a_dtype_that_no_kernel_takes_raises(self, name):
        with pytest.raises(ValueError, match=r"torch\.int32"):
            choose_kernel(name, "cpu", torch.int32)
