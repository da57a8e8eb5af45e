"""What the workers run: a transformer of each class that db-SP knows, against one process and against stock."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from dbsp_diffusers.reference import attach_single_process
from tests.para.para_cases import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs

MASKS = {
    "synthetic": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8},
    "sparge": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 8, "dense_text": False},
}
DENSE: dict[str, Any] = {"mask": {"source": "dense"}}


def outputs(transformer: Any, inputs: dict[str, Any]) -> list[torch.Tensor]:
    """A sample, and with MiniMax-H3 audio."""
    return [part for part in transformer(**inputs) if isinstance(part, torch.Tensor)]


def apart(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(a, b, strict=True))


def run_model(
    rank: int, world: int, model: str, strategy: str, layout: str
) -> dict[tuple[str, int], tuple[float, float]]:
    """By mask source and batch: (largest difference from one process, from dense attention), undone without a trace.

    "stock" stands for dense masks, compared with the transformer as it is.
    """
    transformer = make_tiny_transformer(model)
    found = {}
    for batch in (1, 2):
        inputs = tiny_inputs(model, batch=batch)
        with torch.no_grad():
            stock, before = outputs(transformer, inputs), fingerprint(transformer)
            for name, mask in MASKS.items():
                if name == "synthetic" and model == "flux-reference":
                    continue  # its patterns are those of one grid
                config = {"mask": mask, "strategy": strategy, "layout": layout, "debug": True}
                single = attach_single_process(transformer, config)
                expected = outputs(transformer, inputs)
                single.detach()
                found[name, batch] = _run(transformer, inputs, config, expected, stock)
            found["stock", batch] = _run(transformer, inputs, DENSE | {"strategy": strategy}, stock, stock)
            assert fingerprint(transformer) == before, "disable left something behind"
            assert apart(outputs(transformer, inputs), stock) == 0
    return found


def _run(
    transformer: Any,
    inputs: dict[str, Any],
    config: dict[str, Any],
    expected: list[torch.Tensor],
    dense: list[torch.Tensor],
) -> tuple[float, float]:
    session = dbsp_diffusers.enable(transformer, config)
    out = outputs(transformer, inputs)
    assert session.end() == session.layers
    dbsp_diffusers.disable(transformer)
    return apart(out, expected), apart(out, dense)
