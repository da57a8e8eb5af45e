"""What the workers run: gradients of a transformer's every parameter, and training, against one process."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS, outputs
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.references import by_first_rank
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process


def _in_float64(inputs: dict[str, Any]) -> dict[str, Any]:
    def wide(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(wide, value))
        return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return {name: wide(value) for name, value in inputs.items()}


def _loss(transformer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Every output is weighed at random."""
    draws = torch.Generator().manual_seed(5)
    parts = outputs(transformer, inputs)
    return torch.stack(
        [(out * torch.randn(out.shape, generator=draws, dtype=out.dtype)).mean() for out in parts]
    ).sum()


def _gradients_of(transformer: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in transformer.named_parameters() if p.grad is not None}


@by_first_rank
def one_process(model: str, mask: str) -> dict[str, torch.Tensor]:
    transformer = make_tiny_transformer(model).double().train()
    attach_single_process(transformer, {"mask": MASKS[mask]})
    _loss(transformer, _in_float64(tiny_inputs(model, batch=2))).backward()
    return _gradients_of(transformer)


def gradients_of_model(
    rank: int, world: int, model: str, strategy: str, mask: str, checkpointing: bool
) -> tuple[float, float, int]:
    """(largest difference of a parameter's gradient from one process, as a share of the largest gradient; the same
    without the sum over ranks; passes counted)."""
    transformer = make_tiny_transformer(model).double().train()
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    inputs = _in_float64(tiny_inputs(model, batch=2))
    config = with_debug({"mask": MASKS[mask], "strategy": strategy})
    expected = one_process(model, mask)
    session = dbsp_diffusers.enable(transformer, config)
    _loss(transformer, inputs).backward()
    partial = _gradients_of(transformer)
    dbsp_diffusers.sum_gradients(transformer)
    found = _gradients_of(transformer)
    counted = session.statistics()["calls"]
    dbsp_diffusers.disable(transformer)
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())

    def apart(grads: dict[str, torch.Tensor]) -> float:
        return max(float((grads[name] - expected[name]).abs().max()) for name in expected) / largest

    return apart(found), apart(partial), int(counted) // session.layers
