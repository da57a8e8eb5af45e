"""The kernel checks of `scripts/gpu_suite`, on a GPU. Needs pytest alone, so that it runs on bare GPU machines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from scripts.checks.gpu import kernels
from scripts.checks.gpu.setting import Setting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
CASES = {case.name: case for case in kernels.cases(Setting())}


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    """Fills what torch leaves uninitialised with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CASES)
def test_kernel_is_correct(name: str) -> None:
    rows = list(CASES[name].run())
    assert rows
    assert [row for row in rows if not row.correct] == []
