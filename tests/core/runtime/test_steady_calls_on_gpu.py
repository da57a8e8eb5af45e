"""Counts of a steady attention on a GPU that is stood in for: what Python must not do again at every call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core.masks.grid import BlockGrid
from dbsp_kernels.inputs import KernelInputs

pytest.importorskip("triton")
from scripts.bench.steady_call import SteadyCalls, gpu_stood_in

LAUNCHES_AND_COLLECTIVES = {
    ("static", "U8R1"): (6, 2),
    ("static", "U2R4"): (18, 5),
    ("static", "U1R8"): (31, 9),
    ("predicted", "U8R1"): (13, 4),
    ("predicted", "U2R4"): (23, 7),
    ("predicted", "U1R8"): (38, 11),
}
MOST_LENGTHS = 8
"""Calls of a tensor's `__len__`, which take three times as long as its shape."""


@contextmanager
def counted(*methods: tuple[type, str]) -> Iterator[Counter[str]]:
    """Counts calls of methods within the block, by name."""
    calls: Counter[str] = Counter()

    def watched(method: Any, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*args, **options)

        return call

    with ExitStack() as patches:
        for owner, name in methods:
            patches.enter_context(mock.patch.object(owner, name, watched(getattr(owner, name), name)))
        yield calls


@pytest.mark.parametrize(("mask", "strategy"), LAUNCHES_AND_COLLECTIVES)
def test_steady_call_repeats_no_work(mask: str, strategy: str) -> None:
    launches: Counter[str] = Counter()
    with gpu_stood_in(lambda *_, **__: launches.update(["launches"])):
        calls = SteadyCalls(mask, strategy)
        for _ in range(2):
            calls.begin()
            calls.attend()
        calls.begin()
        launches.clear()
        calls.group.started.clear()
        with counted((BlockGrid, "__post_init__"), (KernelInputs, "check"), (torch.Tensor, "__len__")) as seen:
            calls.attend()
    costs = launches["launches"], calls.group.started["collectives"]
    assert costs == LAUNCHES_AND_COLLECTIVES[mask, strategy]
    assert (seen["__post_init__"], seen["check"]) == (0, 0)
    assert seen["__len__"] <= MOST_LENGTHS
