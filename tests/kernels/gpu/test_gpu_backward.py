"""Kernels' backward on a GPU, against the reference's in float64. Run by `scripts/gpu_suite` and `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KERNELS, BackwardInputs, KernelInputs, KernelRequirements, TransposedTable
from dbsp_kernels import block_attention_backward as backward_of
from tests.kernels.packed_inputs import full_counts, kinder, packed, relative_error
from tests.kernels.test_backward import expected_and_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(inputs: BackwardInputs) -> BackwardInputs:
    given = inputs.forward
    tensors = {name: value.cuda() for name, value in vars(given).items() if isinstance(value, torch.Tensor)}
    table = inputs.transposed()
    there = TransposedTable(table.rows.clamp(min=0).cuda(), table.count.cuda())
    parts = {name: getattr(inputs, name).cuda() for name in ("dout", "out", "lse")}
    forward: KernelInputs = replace(given, **tensors)
    return BackwardInputs(forward, **parts, transposed=lambda: there)


@pytest.mark.parametrize("kernel", ["triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("blocks", [(64, 64), (128, 64), (64, 128), (128, 128)], ids=str)
def test_gradients_equal_the_references(kernel, dtype, width, blocks):
    needs = KernelRequirements(blocks, width, lse=True, ragged_rows=True, backward=True)
    reason = KERNELS[kernel].why_unsupported("cuda", dtype, needs)
    if reason is not None:
        pytest.skip(reason)
    p = kinder(packed(24, 16, *blocks, width=width, dtype=dtype, seed=1))
    p = replace(p, kv_index=p.kv_index.clamp(min=0))
    assert int(full_counts(p).sum()) > 0
    expected, inputs = expected_and_inputs(p)
    first, second = (backward_of(on_gpu(inputs), kernel) for _ in range(2))
    for name, one, again, right in zip("qkv", first, second, expected, strict=True):
        assert relative_error(one.cpu(), right) <= (2e-2 if dtype == torch.bfloat16 else 4e-3), name
        assert torch.equal(one, again) or kernel != "triton", "the same bits every time"
