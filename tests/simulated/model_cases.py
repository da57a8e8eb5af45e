"""Brief transformers for simulated GPUs, and what one process makes of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from dbsp_diffusers.models import ARCHITECTURES
from tests.support.gradients import gradients_of, loss_of
from tests.support.models.tiny_transformers import TINY, make_brief_transformer, tiny_inputs
from tests.support.outcomes import alone, outputs
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

BLOCKS = {"block_q": 16, "block_k": 16}
MASKS: dict[str, dict[str, Any]] = {
    "static": {"source": "synthetic", "density": 0.4, **BLOCKS},
    "predicted": {"source": "sol", "tau": 0.3, "dense_text": False, **BLOCKS},
    "selected": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "dense_text": False, **BLOCKS},
}


def brief_inputs(model: str) -> dict[str, Any]:
    """Returns inputs of three blocks or more: of video alone 48 tokens; with 9 or more of text in it, 24.

    With this seed each mask of each class leaves something out.
    """
    without_text = ARCHITECTURES[TINY[model].cls].text is None
    thw = (2, 3, 8) if without_text else (1, 3, 8) if "2D" in TINY[model].cls else (3, 2, 4)
    return tiny_inputs(model, thw, seed=7)


def own_device(rank: int) -> torch.device:
    """Returns the rank's device, which is then the current one."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def moved(value: Any, device: torch.device) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value)


@shared
def on_one_process(model: str, mask: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a transformer gives with a mask, and without."""
    transformer, inputs = make_brief_transformer(model), brief_inputs(model)
    with torch.no_grad():
        return alone(transformer, inputs, {"mask": MASKS[mask]}), outputs(transformer, inputs)


def backward(transformer: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    parts = outputs(transformer, inputs)
    loss_of(parts, range(len(parts))).backward()
    return gradients_of(transformer)


@shared
def gradients_on_one_process(model: str, mask: str) -> dict[str, torch.Tensor]:
    transformer = make_brief_transformer(model).train()
    attach_single_process(transformer, {"mask": MASKS[mask]})
    return backward(transformer, brief_inputs(model))
