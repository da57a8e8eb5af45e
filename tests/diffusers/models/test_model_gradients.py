"""Gradients of whole transformers: every parameter's, against one process with a dense token mask."""

from __future__ import annotations

import pytest

from tests.diffusers.models.gradient_cases_of_models import gradients_of_model

CASES = [
    ("wan", 2, "U1R2", "sparge", True),
    ("cogvideox", 2, "U1R2", "synthetic", True),
    ("hunyuan", 2, "U1R2", "synthetic", False),
    ("flux", 2, "U2R1", "synthetic", True),
    ("ltx2", 2, "U2R1", "synthetic", False),
    ("krea2", 2, "U1R2", "synthetic", True),
]
LONG = [
    ("wan", 4, "U2R2", "synthetic", False),
    ("ltx2.3", 2, "U1R2", "sparge", True),
    ("animate", 2, "U2R1", "synthetic", True),
    ("consisid", 2, "U1R2", "synthetic", False),
]
CASES += [pytest.param(*case, marks=pytest.mark.long) for case in LONG]


@pytest.mark.parametrize(("model", "world", "strategy", "mask", "checkpointing"), CASES)
def test_every_parameters_gradient_equals_one_process(pool, model, world, strategy, mask, checkpointing):
    for error, partial, passes in pool(world).run(gradients_of_model, model, strategy, mask, checkpointing):
        assert error <= 1e-6  # norms of diffusers are in float32
        assert partial > 1e-4, "without the sum over ranks they are other ones"
        assert passes == 1, "what activation checkpointing computes again is not counted"
