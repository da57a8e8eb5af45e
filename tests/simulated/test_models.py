"""Every transformer class that db-SP knows, on two simulated GPUs: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import WITHOUT_GRID
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import (
    MASKS,
    backward,
    brief_inputs,
    gradients_on_one_process,
    mask_for,
    moved,
    on_one_process,
    own_device,
)
from tests.support.gradients import summed_over_ranks
from tests.support.models.tiny_transformers import TINY, make_brief_transformer
from tests.support.outcomes import assert_near, outputs, share_apart

FIRST = {tiny.cls: name for name, tiny in reversed(TINY.items())}
"""By class, the first variant."""
OTHERS = [name for name in TINY if name not in FIRST.values()]
CASES = [
    pytest.param(model, mask, marks=() if (mask == "predicted") == (number % 4 == 0) else pytest.mark.long)
    for number, model in enumerate(FIRST.values())
    for mask in ("static", "predicted")
]
"""Each class with one kind of mask; with both, and with its other variants, in the long part."""
CASES += [pytest.param(model, mask, marks=pytest.mark.long) for model in OTHERS for mask in ("static", "predicted")]


@torch.no_grad()
def model_on_gpus(rank: int, world: int, model: str, mask: str) -> None:
    device, (expected, dense) = own_device(rank), on_one_process(model, mask)
    transformer = make_brief_transformer(model).to(device)
    dbsp_diffusers.enable(transformer, {"mask": mask_for(model, mask)})
    found = outputs(transformer, moved(brief_inputs(model), device))
    dbsp_diffusers.disable(transformer)
    dense_mask = (mask == "static" and model in WITHOUT_GRID) or model in OTHERS
    assert_near(found, expected, None if dense_mask else dense)


@pytest.mark.parametrize(("model", "mask"), [*CASES, ("wan", "selected")])
def test_model_on_gpus_equals_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    gpu_node.run(2, model_on_gpus, model, mask)


def test_every_known_class_is_tried() -> None:
    assert FIRST.keys() == ARCHITECTURES.keys()


def _in_bfloat16(transformer: Any) -> Any:
    """Casts as from_pretrained does, which leaves some modules in float32."""
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if kept.isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(torch.bfloat16)
    return transformer


@torch.no_grad()
def model_in_bfloat16(rank: int, world: int, model: str) -> float:
    """Returns the root mean square of the difference from one process in float32, as a share of its values'."""
    device, (expected, _) = own_device(rank), on_one_process(model, "static")
    transformer = _in_bfloat16(make_brief_transformer(model)).to(device)
    dbsp_diffusers.enable(transformer, {"mask": mask_for(model, "static")})
    found = outputs(transformer, moved(moved(brief_inputs(model), torch.bfloat16), device))
    dbsp_diffusers.disable(transformer)
    difference = torch.cat([(one.cpu().float() - other).flatten() for one, other in zip(found, expected, strict=True)])
    return float(difference.norm() / torch.cat([one.flatten() for one in expected]).norm())


ROUNDED = ("wan", "z-image", "minimax-h3")
LONG_ROUNDED = ("cogvideox", "hunyuan", "ltx", "cosmos", "flux", "qwen", "krea2", "ernie-image", "kandinsky5")


@pytest.mark.parametrize("model", [*ROUNDED, *(pytest.param(one, marks=pytest.mark.long) for one in LONG_ROUNDED)])
def test_model_in_bfloat16_is_near_one_process(gpu_node: GpuNode, model: str) -> None:
    for share in gpu_node.run(2, model_in_bfloat16, model):
        assert 1e-4 < share <= 0.03


def gradients_on_gpus(rank: int, world: int, model: str, mask: str) -> None:
    device, expected = own_device(rank), gradients_on_one_process(model, mask)
    transformer = make_brief_transformer(model).train().to(device)
    dbsp_diffusers.enable(transformer, {"mask": MASKS[mask]})
    partial = backward(transformer, moved(brief_inputs(model), device))
    dbsp_diffusers.disable(transformer)
    assert partial.keys() == expected.keys()
    assert share_apart(map(summed_over_ranks, partial.values()), expected.values()) <= 1e-5
    assert share_apart(partial.values(), expected.values()) > 1e-4, "without the sum over ranks they are other ones"


@pytest.mark.parametrize(
    ("model", "mask"), [("wan", "predicted"), pytest.param("flux", "static", marks=pytest.mark.long)]
)
def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    gpu_node.run(2, gradients_on_gpus, model, mask)
