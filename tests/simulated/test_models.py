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
    pytest.param(model, mask, marks=() if (mask == "predicted") == (number % 4 == 0) else pytest.mark.long)
    for number, model in enumerate(FIRST.values())
    for mask in ("static", "predicted")
]
"""Each class with one kind of mask; with both in the long part."""


@pytest.mark.parametrize(("model", "mask"), [*CASES, ("wan", "selected")])
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


ROUNDED = ("wan", "z-image", "minimax-h3")
LONG_ROUNDED = ("cogvideox", "hunyuan", "ltx", "cosmos", "flux", "qwen", "krea2", "ernie-image", "kandinsky5")


@pytest.mark.parametrize("model", [*ROUNDED, *(pytest.param(one, marks=pytest.mark.long) for one in LONG_ROUNDED)])
def test_model_in_bfloat16_is_near_one_process(gpu_node: GpuNode, model: str) -> None:
    for share in gpu_node.run(2, model_cases.model_in_bfloat16, model):
        assert 1e-4 < share <= 0.03


@pytest.mark.parametrize(
    ("model", "mask"), [("wan", "predicted"), pytest.param("flux", "static", marks=pytest.mark.long)]
)
def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    for summed, partial in gpu_node.run(2, model_cases.gradients_on_gpus, model, mask):
        assert summed <= TOLERANCE
        assert partial > 1e-4, "without the sum over ranks they are other ones"
