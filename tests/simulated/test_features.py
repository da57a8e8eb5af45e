"""Features of other libraries on simulated GPUs: put on before `enable` and after it, `disable` leaves no trace.

tests/diffusers has, on gloo, what simulated tensors do not: FSDP2, torchao's tensors, torch.compile.
"""

from __future__ import annotations

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated.feature_cases import FEATURES, Order, together

TOLERANCE = 1e-5
CASES = [
    pytest.param(
        name,
        first,
        id=f"{name} {'before' if first else 'after'}",
        marks=() if (number + first) % 2 else pytest.mark.long,
    )
    for number, name in enumerate(FEATURES)
    for first in (True, False)
]
"""Each feature in one order, before `enable` or after it; with both in the long part."""


@pytest.mark.parametrize(("name", "first"), CASES)
def test_feature_on_gpus_equals_one_process_and_leaves_no_trace(gpu_node: GpuNode, name: str, first: bool) -> None:
    feature = FEATURES[name]
    if name == "cache-dit":
        pytest.importorskip("cache_dit")
    for found in gpu_node.run(2, together, Order((name,), int(first))):
        assert found.difference <= TOLERANCE
        assert found.computed == found.expected, "all ranks must skip what one process skips"
        assert found.effect > 100 * TOLERANCE or not feature.acts, "the feature must matter"
        assert min(found.computed) < max(found.computed) or not feature.skips, "the cache must skip"
        assert found.left == []
        assert found.identical_bits
