"""Kernels' backward on packed rows, against autograd of attention written out in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_kernels import BackwardInputs, KernelInputs, block_attention_backward
from dbsp_kernels.backends import cpu
from tests.kernels.backward_inputs import expected_and_inputs, transposed
from tests.kernels.packed_inputs import kinder, packed
from tests.support.interpreter import interpreted

BLOCKS = [(8, 4), (16, 16), (16, 32), (64, 64), (128, 64)]


def assert_close(found, expected, tolerance):
    for name, one, right in zip("qkv", found, expected, strict=True):
        assert one.isfinite().all(), name
        assert float((one - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max())), name


@pytest.mark.parametrize("kernel", ["cpu", "reference", "triton"])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
def test_gradients_of_one_call(kernel, blocks):
    rows, keys = (5, 6) if max(blocks) < 64 else (3, 3)  # large ones are slow in the interpreter
    for seed, head_dim in enumerate((16, 24) if max(blocks) < 64 else (24,)):
        expected, inputs = expected_and_inputs(kinder(packed(rows, keys, *blocks, head_dim=head_dim, seed=seed)))
        with interpreted():
            assert_close(block_attention_backward(inputs, kernel), expected, 2e-5)


@pytest.mark.parametrize("kernel", ["cpu", "reference", "triton"])
def test_gradients_of_one_kv_step(kernel):
    """Checks a call whose softmax spans keys that only other calls see."""
    one, other = (kinder(packed(5, 6, 16, 16, seed=seed)) for seed in (1, 2))
    other = replace(other, q=one.q)
    expected, inputs = expected_and_inputs(one, other)
    _, others_inputs = expected_and_inputs(other, one)
    with interpreted():
        dq, dk, dv = block_attention_backward(inputs, kernel)
        rest, _, _ = block_attention_backward(others_inputs, kernel)
        wrong, _, _ = block_attention_backward(replace(inputs, lse=inputs.lse + 0.1), kernel)
    assert_close((dq + rest, dk, dv), expected, 2e-5)
    with pytest.raises(AssertionError):
        assert_close((wrong + rest, dk, dv), expected, 1e-3)


def test_neighbours_that_attend_to_the_same_blocks(monkeypatch):
    """Checks that neighbours are one sequence on the CPU."""
    monkeypatch.setattr(cpu, "LONG", 16)
    lists = [[2, 1, 3], [2, 1, 3], [2, 1, 3], [1, 3], [5, 0], [5, 0]]
    index = torch.tensor([entries + [-7] * (3 - len(entries)) for entries in lists]).int()
    p = kinder(replace(packed(rows=6), kv_index=index, kv_count=torch.tensor(list(map(len, lists))).int()))
    shapes = [tuple(rows.shape) for rows, _ in cpu._batches(KernelInputs(*vars(p).values(), 0.25))]
    assert shapes == [(3, 1), (1, 3)]
    expected, inputs = expected_and_inputs(p)
    assert_close(block_attention_backward(inputs, "cpu"), expected, 2e-5)


@pytest.mark.parametrize("kernel", ["cpu", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_sums_in_float32(kernel, dtype):
    expected, inputs = expected_and_inputs(kinder(packed(12, 12, 16, 16, head_dim=32, dtype=dtype)))
    with interpreted():
        found = block_attention_backward(inputs, kernel)
    assert all(one.dtype == torch.float32 for one in found)
    assert_close(found, expected, 2e-2)


@pytest.mark.parametrize("kernel", ["cpu", "reference", "triton"])
@pytest.mark.parametrize(("rows", "blocks"), [(0, 3), (3, 0), (3, 3)])
def test_nothing_to_attend_to(kernel, rows, blocks):
    p = packed(rows, max(blocks, 1))
    p = replace(p, k=p.k[:blocks], v=p.v[:blocks], kv_len=p.kv_len[:blocks], kv_count=torch.zeros_like(p.kv_count))
    given = KernelInputs(p.q, p.k, p.v, p.kv_index, p.kv_count, p.kv_len, 0.25, torch.zeros_like(p.kv_count))
    lse = torch.full(p.q.shape[:2], -torch.inf)
    inputs = BackwardInputs(given, torch.ones_like(p.q), torch.zeros_like(p.q), lse, lambda: (*transposed(p), None))
    with interpreted():
        assert not any(bool(one.any()) for one in block_attention_backward(inputs, kernel))
