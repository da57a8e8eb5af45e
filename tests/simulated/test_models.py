"""Every transformer class that db-SP knows, on two simulated GPUs: values and gradients."""

from __future__ import annotations

import pytest

from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import WITHOUT_GRID
from tests.gpu_node.node import GpuNode
from tests.simulated import model_cases
from tests.support.models.tiny_transformers import TINY

TOLERANCE = 1e-5
FIRST = {tiny.cls: name for name, tiny in reversed(TINY.items())}
"""By class, the first variant."""
OTHERS = [name for name in TINY if name not in FIRST.values()]
CASES = [
    pytest.param(model, mask, marks=() if (number + kind) % 2 else pytest.mark.long)
    for number, model in enumerate(FIRST.values())
    for kind, mask in enumerate(("static", "predicted"))
]
"""Each class with one kind of mask; with both in the long part."""


@pytest.mark.parametrize(("model", "mask"), [*CASES, ("wan", "selected"), ("flux", "selected")])
def test_model_on_gpus_equals_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    for difference, from_dense in gpu_node.run(2, model_cases.model_on_gpus, model, mask):
        assert difference <= TOLERANCE
        assert from_dense > 1e-3 or (mask == "static" and model in WITHOUT_GRID), "the mask must matter"


@pytest.mark.long
@pytest.mark.parametrize("model", OTHERS)
def test_variant_on_gpus_equals_one_process(gpu_node: GpuNode, model: str) -> None:
    for mask in ("static", "predicted"):
        for difference, _ in gpu_node.run(2, model_cases.model_on_gpus, model, mask):
            assert difference <= TOLERANCE


def test_every_known_class_is_tried() -> None:
    assert FIRST.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    "model",
    [
        *(
            "wan",
            "cogvideox",
            "hunyuan",
            "ltx",
            "cosmos",
            "flux",
            "qwen",
            "z-image",
            "krea2",
            "ernie-image",
            "minimax-h3",
        ),
        "kandinsky5",
    ],
)
def test_model_in_bfloat16_is_near_one_process(gpu_node: GpuNode, model: str) -> None:
    for share in gpu_node.run(2, model_cases.model_in_bfloat16, model):
        assert 1e-4 < share <= 0.03


@pytest.mark.parametrize(("model", "mask"), [("wan", "predicted"), ("flux", "static")])
def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    for summed, partial in gpu_node.run(2, model_cases.gradients_on_gpus, model, mask):
        assert summed <= TOLERANCE
        assert partial > 1e-4, "without the sum over ranks they are other ones"
