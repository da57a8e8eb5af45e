"""Gradients of whole transformers: every parameter's, against one process with a dense token mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS
from tests.support.gradients import gradients_of, in_float64, loss_of
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import outputs, share_apart
from tests.support.references import by_first_rank
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process

CASES = [
    ("wan", 2, "U1R2", "sparge", True),
    ("hunyuan", 2, "U1R2", "synthetic", False),
    ("ltx2", 2, "U2R1", "synthetic", False),
    *(
        pytest.param(model, 2, "U1R2", "synthetic", True, marks=pytest.mark.long)
        for model in ("cogvideox", "flux", "krea2")
    ),
    pytest.param("wan", 4, "U2R2", "synthetic", False, marks=pytest.mark.long),
]


def backward(transformer: Any, model: str) -> dict[str, torch.Tensor]:
    parts = outputs(transformer, in_float64(tiny_inputs(model, batch=2)))
    loss_of(parts, range(len(parts))).backward()
    return {name: gradient.clone() for name, gradient in gradients_of(transformer).items()}


@by_first_rank
def one_process(model: str, mask: str) -> dict[str, torch.Tensor]:
    transformer = make_tiny_transformer(model).double().train()
    attach_single_process(transformer, {"mask": MASKS[mask]})
    return backward(transformer, model)


def gradients_of_model(rank: int, world: int, model: str, strategy: str, mask: str, checkpointing: bool) -> None:
    transformer, expected = make_tiny_transformer(model).double().train(), one_process(model, mask)
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    session = dbsp_diffusers.enable(transformer, with_debug({"mask": MASKS[mask], "strategy": strategy}))
    partial = backward(transformer, model)
    dbsp_diffusers.sum_gradients(transformer)
    found = gradients_of(transformer)
    assert session.statistics()["calls"] == session.layers, "what is computed again in backward is not counted"
    dbsp_diffusers.disable(transformer)
    assert found.keys() == expected.keys()
    assert share_apart(found.values(), expected.values()) <= 1e-6  # norms of diffusers are in float32
    assert share_apart(partial.values(), expected.values()) > 1e-4, "without the sum over ranks they are other ones"


@pytest.mark.parametrize(("model", "world", "strategy", "mask", "checkpointing"), CASES)
def test_every_parameters_gradient_equals_one_process(pool, model, world, strategy, mask, checkpointing):
    pool(world).run(gradients_of_model, model, strategy, mask, checkpointing)
