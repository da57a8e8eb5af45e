"""Whole pipelines of each model on two ranks, against one process."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers.models.pipeline_cases import CASES, run_pipeline

TOLERANCE = 1e-5
COSMOS_TOLERANCE = 2**-15
"""Two roundings of float32 in Cosmos' latents, which start at 80 times their size; it has no float64."""
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 4, "block_k": 4, "dense_text": False}


USUAL = (
    "Cog",
    "CosmosText",
    "FluxKontext",
    "HunyuanVideo15",
    "HunyuanVideoFrame",
    "LTX2P",
    "QwenImageLayered",
    "ZImage",
)
"""How the names of pipelines begin that differ most around a transformer; all others run in the long part."""
NUMBERS = [
    pytest.param(number, id=case.pipeline, marks=() if case.pipeline.startswith(USUAL) else pytest.mark.long)
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("number", NUMBERS)
def test_pipeline_equals_one_process(pool, number):
    """LTX-2 in float64: its guidance multiplies rounding, by which in float32 a predicted block is another one."""
    config = {"mask": SPARGE, "strategy": "U1R2"}
    dtype = torch.float64 if CASES[number].pipeline.startswith("LTX2") else torch.float32
    for from_single, from_dense in pool(2).run(run_pipeline, number, config, dtype):
        assert from_single <= (COSMOS_TOLERANCE if CASES[number].pipeline.startswith("Cosmos") else TOLERANCE)
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
