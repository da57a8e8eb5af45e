"""Offloading, casting, quantised and fused weights, backends on simulated GPUs: before db-SP and after it.

The others are on gloo (tests/diffusers): group and sequential offload, which set tensors' `data` and class; LoRA;
FSDP2, whose collectives are torch's own; torch.compile, which does not trace simulated tensors; other caches.
"""

from __future__ import annotations

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated.feature_cases import FEATURES, WITH_AN_EFFECT, feature_on_gpus

TOLERANCE = 1e-5


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_goes_together_with_db_sp(gpu_node: GpuNode, name: str, first: bool) -> None:
    for from_one_process, effect, left in gpu_node.run(2, feature_on_gpus, name, first):
        assert from_one_process <= TOLERANCE
        assert left <= TOLERANCE
        assert effect > 100 * TOLERANCE or name not in WITH_AN_EFFECT, "the feature must matter"
