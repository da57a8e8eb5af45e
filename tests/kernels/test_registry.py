"""Which kernels serve what, and in which order "auto" prefers them, on GPUs that need not be here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KERNELS, KernelRequirements, available, choose_kernel

RING = KernelRequirements((64, 64), 128, lse=True, ragged_rows=True, tokens=1000)
HEADS = KernelRequirements((128, 64), 128, tokens=1000)
TRAINING = KernelRequirements((128, 128), 128, lse=True, ragged_rows=True, tokens=1000, backward=True)
NARROW = KernelRequirements((64, 64), 8, lse=True, ragged_rows=True, tokens=1000)
ODD_BLOCKS = KernelRequirements((32, 48), 64, lse=True, tokens=1000)

SERVING = [
    (None, torch.float32, RING, "cpu reference"),
    (None, torch.float64, TRAINING, "cpu reference"),
    ((8, 0), torch.float16, RING, "triton flex reference"),
    ((8, 0), torch.float32, RING, "triton flex reference"),
    ((8, 0), torch.float64, RING, "reference"),
    ((8, 0), torch.bfloat16, HEADS, "triton flex reference sparge"),
    ((8, 0), torch.bfloat16, TRAINING, "triton flex reference"),
    ((9, 0), torch.bfloat16, RING, "triton flex reference cudnn fastvideo"),
    ((9, 0), torch.float16, RING, "triton flex reference cudnn"),
    ((9, 0), torch.bfloat16, HEADS, "triton flex reference"),
    ((9, 0), torch.bfloat16, replace(HEADS, blocks=(64, 128)), "triton flex reference sparge"),
    ((9, 0), torch.bfloat16, TRAINING, "triton flex reference cudnn"),
    ((9, 0), torch.float16, TRAINING, "triton flex reference"),
    ((9, 0), torch.bfloat16, NARROW, "triton reference"),
    ((9, 0), torch.bfloat16, ODD_BLOCKS, "triton reference"),
    ((10, 0), torch.float16, RING, "triton flex reference"),
    ((10, 0), torch.bfloat16, RING, "triton flex reference cudnn"),
    ((12, 0), torch.bfloat16, TRAINING, "triton flex reference"),
]
"""Compute capability (None: the CPU), dtype, what is asked for, and the kernels that serve it, best first."""


@pytest.mark.parametrize(("capability", "dtype", "needs", "names"), SERVING)
def test_who_serves(monkeypatch, capability, dtype, needs, names):
    for name, kernel in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, replace(kernel, why_unavailable=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    device = "cuda" if capability else "cpu"
    assert available(device, dtype, needs) == names.split()
    assert choose_kernel("auto", device, dtype, needs).name == names.split()[0]


def test_auto_takes_none_that_no_gpu_has_shown_right_and_faster():
    assert {name for name, kernel in KERNELS.items() if kernel.by_name_only} == {*("sparge", "cudnn", "fastvideo")}
