"""A report names the kernels that ran."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dbsp_core.reports import observer
from dbsp_core.reports.observer import _kernels_of


def step(every: bool | None) -> SimpleNamespace:
    """A KV step's table; every: whether all rows are dense. None: none is known to be."""
    return SimpleNamespace(dense=None if every is None else SimpleNamespace(every=every))


@pytest.mark.parametrize(
    ("fused", "steps", "names"),
    [
        ("flash", [None, None], {"triton"}),
        ("flash", [True, True], {"torch flash (dense heads)"}),
        ("flash", [None, True], {"triton", "torch flash (dense heads)"}),
        ("cudnn", [False], {"torch cudnn (dense heads)", "triton"}),
        (None, [True, False], {"triton"}),
    ],
)
def test_kernels_of_an_attention_are_those_that_ran_its_rows(monkeypatch, fused, steps, names):
    monkeypatch.setattr(observer, "fused_kernel", lambda q: fused)
    executor = SimpleNamespace(tables=[step(every) for every in steps], kernel_name="triton")
    assert set(_kernels_of(executor, torch.empty(1, 2, 3, 4))) == names
