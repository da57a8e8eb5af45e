"""Triton's interpreter for tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.interpreter import interpreted


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Runs kernels in Triton's interpreter, and fills everything that torch leaves uninitialised with NaN."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which scripts/gpu_suite runs the kernels")
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory, too
    assert torch.empty(9).isnan().all()
    with interpreted():
        yield
    torch.use_deterministic_algorithms(False)
