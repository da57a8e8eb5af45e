"""Host waits of passes of a generation like one before, and of training: there must be none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated.steady_cases import waits_of_a_pass
from tests.simulated.test_sessions import BLOCKS, MASKS, WINDOW

KEPT = {"reuse": 100.0}
DENSE_STEPS = {"dense_schedule": {"first_steps": 1}}
SEVERAL = {"source": "union", "of": [MASKS[name] for name in ("window", "sparge", "sol")]}
BY_STEP = {"source": "synthetic", "density": 0.4, "drift": 0.2, **BLOCKS}
PASSES: dict[str, tuple[dict[str, Any], str]] = {
    "static, dense steps": ({"mask": WINDOW, **DENSE_STEPS}, "U2R1"),
    "by step": ({"mask": BY_STEP, **KEPT}, "U1R2"),
    "callable": ({"mask": MASKS["callable"], **KEPT}, "U2R1"),
    "nabla": ({"mask": MASKS["nabla"], **KEPT}, "U1R2"),
    "union": ({"mask": SEVERAL, **KEPT}, "U2R1"),
    "vsa": ({"mask": MASKS["vsa"], **KEPT}, "U2R1"),
    "sparge, dense steps": ({"mask": MASKS["sparge"], **DENSE_STEPS, **KEPT}, "U2R1"),
}
TRAINING: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"mask": WINDOW}, "U1R2"),
    "sparge": ({"mask": MASKS["sparge"], **KEPT}, "U2R1"),
}


@pytest.mark.parametrize(("settings", "strategy"), PASSES.values(), ids=PASSES)
def test_pass_of_known_generation_makes_no_host_wait(
    gpu_node: GpuNode, settings: dict[str, Any], strategy: str
) -> None:
    assert gpu_node.run(2, waits_of_a_pass, settings, strategy, False)[0] == {}


@pytest.mark.parametrize(("settings", "strategy"), TRAINING.values(), ids=TRAINING)
def test_training_makes_no_host_wait(gpu_node: GpuNode, settings: dict[str, Any], strategy: str) -> None:
    assert gpu_node.run(2, waits_of_a_pass, settings, strategy, True)[0] == {}
