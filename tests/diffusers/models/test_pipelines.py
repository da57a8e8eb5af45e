"""Whole pipelines of each model on two ranks, against one process."""

from __future__ import annotations

import pytest
import torch

import dbsp_diffusers
from tests.diffusers.models.pipeline_cases import CASES, made, make_pipe
from tests.support.models.tiny_pipelines import attach_pipeline
from tests.support.outcomes import apart
from tests.support.references import by_first_rank

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


@by_first_rank
def one_process(number: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a pipeline gives with dense attention, and with the mask."""
    torch.manual_seed(0)
    pipe = make_pipe(CASES[number], dtype)
    dense = made(pipe, CASES[number], dtype)
    attach_pipeline(pipe, {"mask": SPARGE})
    return dense, made(pipe, CASES[number], dtype)


def run_pipeline(rank: int, world: int, number: int, dtype: torch.dtype, tolerance: float) -> None:
    dense, expected = one_process(number, dtype)
    torch.manual_seed(0)
    pipe = make_pipe(CASES[number], dtype)
    dbsp_diffusers.enable(pipe, {"mask": SPARGE, "strategy": "U1R2"})
    found = made(pipe, CASES[number], dtype)
    dbsp_diffusers.disable(pipe)
    assert apart(found, expected) <= tolerance
    assert apart(expected, dense) > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.parametrize("number", NUMBERS)
def test_pipeline_equals_one_process(pool, number):
    """Runs LTX-2 in float64: its guidance multiplies rounding, by which in float32 a predicted block is another."""
    name = CASES[number].pipeline
    dtype = torch.float64 if name.startswith("LTX2") else torch.float32
    pool(2).run(run_pipeline, number, dtype, COSMOS_TOLERANCE if name.startswith("Cosmos") else TOLERANCE)
