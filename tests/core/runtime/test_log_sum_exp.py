"""Rings take only kernels that return the log-sum-exp of their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_kernels import KERNELS, KernelRequirements
from dbsp_kernels.kernel import supports

LSE = KernelRequirements(lse=True)


def test_a_kernel_that_returns_no_log_sum_exp_serves_no_ring(monkeypatch):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], returns_lse=False))
    assert not supports("cpu", LSE)
    mask = BlockMask.dense(2, BlockGrid.uniform(64, 16))
    layout = SequenceLayout.contiguous(mask.grid.tokens, 2)
    with pytest.raises(ValueError, match="kernel 'cpu' cannot serve this plan: it returns no log-sum-exp"):
        DualBalancedAttention.prepare(make_plan(mask, "U1R2"), mask, layout, SequenceGroup(0, 2), kernel="cpu")


def test_every_kernel_that_merges_serves_rings():
    for kernel in ("auto", "cpu", "triton", "reference"):
        assert supports(kernel, LSE)
    assert not supports("sparge", LSE)
