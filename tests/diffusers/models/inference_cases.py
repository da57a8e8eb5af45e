"""What the workers run: training after a pass of the same size under torch.inference_mode()."""

from __future__ import annotations

import torch

import dbsp_diffusers
from tests.diffusers.models.model_cases import DENSE, apart, outputs
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs


def train_after_inference(rank: int, world: int, model: str) -> tuple[float, int]:
    """Returns how far the two passes' outputs are apart, and the number of parameters with gradients."""
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model)
    dbsp_diffusers.enable(transformer, DENSE | {"strategy": "U2R1"})
    with torch.inference_mode():
        validated = [one.clone() for one in outputs(transformer, inputs)]
    trained = outputs(transformer, inputs)
    sum(one.square().sum() for one in trained).backward()
    with torch.no_grad():
        difference = apart(validated, [one.detach() for one in trained])
    return difference, sum(parameter.grad is not None for parameter in transformer.parameters())
