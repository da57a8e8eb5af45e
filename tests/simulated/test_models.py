"""Transformers on two simulated GPUs: values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import (
    MASKS,
    backward,
    brief_inputs,
    gradients_on_one_process,
    moved,
    on_one_process,
    own_device,
)
from tests.support.gradients import summed_over_ranks
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import assert_near, outputs, share_apart

CASES = (
    ("wan", "static"), ("wan", "predicted"), ("wan", "selected"), ("cogvideox", "static"), ("hunyuan", "predicted"),
    ("ltx2", "static"), ("flux", "predicted"), ("qwen", "static"), ("z-image", "predicted"), ("krea2", "static"),
    ("minimax-h3", "static"), ("kandinsky5", "predicted"),
)  # fmt: skip
"""Models whose tokens come to attention in different ways; tests/diffusers/models has all."""


@torch.no_grad()
def model_on_gpus(rank: int, world: int, model: str, mask: str) -> None:
    device, (expected, dense) = own_device(rank), on_one_process(model, mask)
    transformer = make_brief_transformer(model).to(device)
    dbsp_diffusers.enable(transformer, {"mask": MASKS[mask]})
    found = outputs(transformer, moved(brief_inputs(model), device))
    dbsp_diffusers.disable(transformer)
    assert_near(found, expected, dense)


@pytest.mark.parametrize(("model", "mask"), CASES)
def test_model_on_gpus_equals_one_process(gpu_node: GpuNode, model: str, mask: str) -> None:
    gpu_node.run(2, model_on_gpus, model, mask)


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
    dbsp_diffusers.enable(transformer, {"mask": MASKS["static"]})
    found = outputs(transformer, moved(moved(brief_inputs(model), torch.bfloat16), device))
    dbsp_diffusers.disable(transformer)
    difference = torch.cat([(one.cpu().float() - other).flatten() for one, other in zip(found, expected, strict=True)])
    return float(difference.norm() / torch.cat([one.flatten() for one in expected]).norm())


@pytest.mark.parametrize("model", ["wan", "z-image", "minimax-h3"])
def test_model_in_bfloat16_is_near_one_process(gpu_node: GpuNode, model: str) -> None:
    for share in gpu_node.run(2, model_in_bfloat16, model):
        assert 1e-4 < share <= 0.03


def gradients_on_gpus(rank: int, world: int) -> None:
    device, expected = own_device(rank), gradients_on_one_process("wan", "predicted")
    transformer = make_brief_transformer("wan").train().to(device)
    dbsp_diffusers.enable(transformer, {"mask": MASKS["predicted"]})
    partial = backward(transformer, moved(brief_inputs("wan"), device))
    dbsp_diffusers.disable(transformer)
    assert partial.keys() == expected.keys()
    assert share_apart(map(summed_over_ranks, partial.values()), expected.values()) <= 1e-5


def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode) -> None:
    gpu_node.run(2, gradients_on_gpus)
