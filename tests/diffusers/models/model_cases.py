"""A transformer of each class that db-SP knows, run by workers, against one process and against stock."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs
from tests.support.settings import with_debug
from tests.support.shared import shared

MASKS = {
    "synthetic": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8},
    "sparge": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 8, "dense_text": False},
}
DENSE: dict[str, Any] = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}
WITHOUT_GRID = {"flux-reference", "flux3-reference", "framepack", "ltx-condition", "qwen-edit", "qwen-layered"}
"""Models whose inputs' tokens make no grid."""
BATCHES = {"synthetic": 1, "sparge": 2, "stock": 1}
"""By mask source."""
SKIPPED = {("ltx2.3", 1): 1}
"""By model and batch: layers in which its inputs say that nothing is attended to."""


@shared
def one_process(model: str, source: str) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Returns outputs for the batch of a mask source, with the masks and as the model is; "stock" has no masks."""
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model, batch=BATCHES[source])
    with torch.no_grad():
        stock = outputs(transformer, inputs)
    return (stock, None) if source == "stock" else (alone(transformer, inputs, {"mask": MASKS[source]}), stock)


@torch.no_grad()
def run_model(rank: int, world: int, model: str, strategy: str, sources: tuple[str, ...]) -> None:
    """Compares a transformer with one process for each mask source, and without a trace afterwards.

    "stock" represents dense masks, compared with the transformer as it is.
    """
    transformer = make_tiny_transformer(model)
    before = fingerprint(transformer)
    configs = {source: with_debug({"mask": MASKS[source], "strategy": strategy}) for source in sources}
    configs["stock"] = DbspConfig.load(DENSE | {"strategy": strategy})
    for source, config in configs.items():
        session = dbsp_diffusers.enable(transformer, config)
        found = outputs(transformer, tiny_inputs(model, batch=BATCHES[source]))
        assert len(session.end()) == session.layers - SKIPPED.get((model, BATCHES[source]), 0)
        assert_near(found, *one_process(model, source))
        dbsp_diffusers.disable(transformer)
        assert fingerprint(transformer) == before, "disable left something behind"
    assert apart(outputs(transformer, tiny_inputs(model)), one_process(model, "stock")[0]) == 0
