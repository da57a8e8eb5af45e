"""Features of other libraries on simulated GPUs: put on before `enable` and after it, `disable` leaves no trace.

tests/diffusers has, on gloo, what simulated tensors do not: FSDP2, torchao's tensors, torch.compile.
"""

from __future__ import annotations

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated.feature_cases import FEATURES, Order, together

TOLERANCE = 1e-5
PAIRS = (
    ("model offload", "pyramid attention broadcast"),
    ("LoRA", "sequential offload"),
    ("group offload by blocks", "MagCache"),
    ("int8 weights", "group offload by leaves"),
    ("another backend", "TaylorSeer"),
    ("fused QKV", "layerwise casting"),
    ("model offload", "LoRA"),
)
ALONE = ("SeaCache", "group offload on a stream", "first-block cache", "FasterCache", "cache-dit")
"""With `PAIRS`, every feature: the first of a pair before `enable`, the second after it, these before.

In the long part each is tried alone, both before and after.
"""
ORDERS = [
    *(pytest.param(Order(pair, 1), id=" then ".join(pair)) for pair in PAIRS),
    *(
        pytest.param(
            Order((name,), first),
            id=f"{name} {'before' if first else 'after'}",
            marks=() if first and name in ALONE else pytest.mark.long,
        )
        for name in FEATURES
        for first in (1, 0)
    ),
]


@pytest.mark.parametrize("order", ORDERS)
def test_features_on_gpus_equal_one_process_and_leave_no_trace(gpu_node: GpuNode, order: Order) -> None:
    if "cache-dit" in order.features:
        pytest.importorskip("cache_dit")
    for found in gpu_node.run(2, together, order):
        assert found.difference <= TOLERANCE
        assert found.computed == found.expected, "all ranks must skip what one process skips"
        assert found.effect > 100 * TOLERANCE or not order.acting, "the features must matter"
        assert min(found.computed) < max(found.computed) or not any(one.skips for one in order.parts), "it must skip"
        assert found.is_as_before
