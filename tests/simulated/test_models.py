"""Transformers on two simulated GPUs: values and gradients."""

from __future__ import annotations

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
    ("wan", "selected"), ("cogvideox", "static"), ("hunyuan", "predicted"), ("ltx2", "static"), ("qwen", "static"),
    ("z-image", "predicted"), ("minimax-h3", "static"),
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
