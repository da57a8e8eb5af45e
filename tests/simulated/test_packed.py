"""Packed samples and bags on simulated GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers.packed.packed_model_cases import PackedCase, compare
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import own_device


def case(world: int, name: str, *bags: str, **options) -> object:
    return pytest.param(world, PackedCase(*bags, samples=(3,), brief=True, dtype=torch.float32, **options), id=name)


def compare_on_gpus(rank: int, world: int, case: PackedCase) -> None:
    compare(rank, world, case, own_device(rank))


@pytest.mark.parametrize(
    ("world", "case"),
    [
        case(2, "text of its own length", model="hunyuan", mask="sparge"),
        case(4, "a bag of two and bags of one", "g1n2+g2n1"),
    ],
)
def test_packed_samples_on_gpus_equal_one_by_one(gpu_node: GpuNode, world: int, case: PackedCase) -> None:
    gpu_node.run(world, compare_on_gpus, case)
