"""Packed samples and bags on simulated GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers.packed.packed_model_cases import PackedCase, compare
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import own_device

LONG = pytest.mark.long


def case(world: int, name: str, *bags: str, long: bool = False, **options) -> object:
    one = PackedCase(*bags, samples=(3,), brief=True, dtype=torch.float32, **options)
    return pytest.param(world, one, id=name, marks=LONG if long else ())


def compare_on_gpus(rank: int, world: int, case: PackedCase) -> None:
    compare(rank, world, case, own_device(rank))


@pytest.mark.parametrize(
    ("world", "case"),
    [
        case(2, "all ranks share in each", strategy="U1R2", local=False),
        case(2, "predicted masks", mask="sparge", local=False, long=True),
        case(2, "samples of each rank's loader", strategy="U2R1", long=True),
        case(2, "a rank without samples", model="flux"),
        case(2, "text of its own length", model="hunyuan", mask="sparge"),
        case(4, "a bag of two and bags of one", "g1n2+g2n1"),
        case(4, "bags of two", "g2n2", model="flux", mask="sparge", long=True),
        case(4, "bags that all ranks fill", "g2n2", model="hunyuan", local=False, long=True),
    ],
)
def test_packed_samples_on_gpus_equal_one_by_one(gpu_node: GpuNode, world: int, case: PackedCase) -> None:
    gpu_node.run(world, compare_on_gpus, case)
