"""Which kernels support a request, and in which order "auto" prefers them, on GPUs that need not be here."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KERNELS, KernelRequirements, available, choose_kernel
from dbsp_kernels.errors import UserError
from dbsp_kernels.triton import launch

RING = KernelRequirements((64, 64), 128, lse=True, ragged_rows=True, tokens=1000)
HEADS = KernelRequirements((128, 64), 128, tokens=1000)
TRAINING = KernelRequirements((128, 128), 128, lse=True, ragged_rows=True, tokens=1000, backward=True)
NARROW = KernelRequirements((64, 64), 8, lse=True, ragged_rows=True, tokens=1000)
ODD_BLOCKS = KernelRequirements((32, 48), 64, lse=True, tokens=1000)

SUPPORTED = [
    (None, torch.float32, RING, "cpu reference"),
    (None, torch.float64, TRAINING, "cpu reference"),
    ((8, 0), torch.float16, RING, "triton reference triton-int8"),
    ((8, 0), torch.float32, RING, "triton reference triton-int8"),
    ((8, 0), torch.bfloat16, HEADS, "triton reference sparge triton-int8"),
    ((8, 0), torch.bfloat16, TRAINING, "triton reference"),
    ((9, 0), torch.bfloat16, RING, "triton reference triton-int8"),
    ((9, 0), torch.bfloat16, replace(RING, blocks=(128, 128)), "triton reference fa4 triton-int8"),
    ((9, 0), torch.bfloat16, HEADS, "triton reference triton-int8"),
    ((9, 0), torch.bfloat16, replace(HEADS, blocks=(64, 128)), "triton reference sparge triton-int8"),
    ((9, 0), torch.bfloat16, TRAINING, "triton reference"),
    ((9, 0), torch.bfloat16, NARROW, "triton reference triton-int8"),
    ((9, 0), torch.bfloat16, ODD_BLOCKS, "triton reference triton-int8"),
    ((10, 0), torch.bfloat16, replace(RING, blocks=(256, 128)), "triton reference fa4 triton-int8"),
    ((10, 0), torch.bfloat16, replace(RING, blocks=(128, 128)), "triton reference flashinfer triton-int8"),
    ((12, 0), torch.bfloat16, RING, "triton reference flashinfer triton-int8"),
    ((12, 0), torch.bfloat16, NARROW, "triton reference triton-int8"),
    ((12, 0), torch.bfloat16, TRAINING, "triton reference"),
]
"""Compute capability (None: the CPU), dtype, what is asked for, and the kernels that support it, best first."""


@pytest.fixture
def installed(monkeypatch):
    """Makes every kernel seem installed, on a GPU unless the test changes the capability to None."""
    for name, kernel in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, replace(kernel, why_unavailable=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("capability", "dtype", "needs", "names"), SUPPORTED)
def test_kernels_that_support_a_request_are_found_best_first(monkeypatch, capability, dtype, needs, names):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = "cuda" if capability else "cpu"
    assert available(device, dtype, needs) == names.split()
    assert choose_kernel("auto", device, dtype, needs).name == names.split()[0]


@pytest.mark.usefixtures("installed")
def test_auto_on_cuda_without_triton_raises_and_names_the_package(monkeypatch):
    missing = {"triton": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: missing.get(name, object()))
    monkeypatch.setitem(KERNELS, "triton", replace(KERNELS["triton"], why_unavailable=launch.why_unavailable))
    with pytest.raises(UserError, match=r"triton is not installed; run `pip install triton`"):
        choose_kernel("auto", "cuda", torch.bfloat16)


@pytest.mark.usefixtures("installed")
def test_auto_on_cuda_never_takes_the_reference(monkeypatch):
    with pytest.raises(UserError, match=r"finds no kernel for torch.float64 on cuda \(triton: .*\); use reference$"):
        choose_kernel("auto", "cuda", torch.float64)
    assert choose_kernel("reference", "cuda", torch.float64).name == "reference"
