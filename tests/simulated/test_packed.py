"""Packed samples and bags on simulated GPUs."""

from __future__ import annotations

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated.packed_cases import PackedCase, packed_on_gpus, steady_waits

CASES = {
    "all ranks share in each": (2, PackedCase(strategy="U1R2")),
    "predicted masks": (2, PackedCase(mask="predicted")),
    "samples of each rank's loader": (2, PackedCase(strategy="U2R1", loaders=(1, 1, 0))),
    "a rank without samples": (2, PackedCase("flux", loaders=(0, 0, 0))),
    "text of its own length": (2, PackedCase("hunyuan", mask="predicted", loaders=(0, 1, 1))),
    "a bag of two and bags of one": (4, PackedCase(loaders=(0, 3, 1), bags="g1n2+g2n1")),
    "bags of two": (4, PackedCase("flux", mask="predicted", loaders=(2, 0, 0), bags="g2n2")),
    "bags that all ranks fill": (4, PackedCase("hunyuan", bags="g2n2")),
    "gradients": (2, PackedCase(strategy="U2R1", loaders=(1, 0, 0), gradients=True)),
    "gradients in bags": (4, PackedCase("flux", loaders=(1, 0, 0), bags="g2n2", gradients=True)),
}
LONG = (
    *("predicted masks", "samples of each rank's loader", "bags of two"),
    *("bags that all ranks fill", "gradients"),
)
"""What others do too, with a model or a mask that is slower, or with bags."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_packed_samples_on_gpus_equal_one_by_one(gpu_node: GpuNode, name: str) -> None:
    world, case = CASES[name]
    for predictions, gradients in gpu_node.run(world, packed_on_gpus, case):
        assert max(predictions, gradients) <= 1e-5


@pytest.mark.parametrize(("model", "bags"), [pytest.param("wan", None, marks=pytest.mark.long), ("hunyuan", "g2n1")])
def test_steady_packed_call_makes_no_host_wait(gpu_node: GpuNode, model: str, bags: str | None) -> None:
    for waits in gpu_node.run(2, steady_waits, model, bags):
        assert waits == {}, waits
