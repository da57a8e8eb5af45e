"""Guidance parallelism: two halves of the ranks compute a step's two guidance passes, as one process does."""

from __future__ import annotations

import pytest

from tests.diffusers.models.guidance_cases import Guided, run_guided

TOLERANCE = 1e-5
CASES = {
    "dense": (2, Guided(mask="dense")),
    "static masks": (2, Guided()),
    "predicted masks": (4, Guided(mask="sparge", strategy="U1R2")),
    "four ranks": (4, Guided(strategy="U2R1")),
    "strategy auto": (4, Guided(strategy="auto")),
    "two transformers": (4, Guided(mask="sparge", two=True)),
    "control video": (2, Guided("WanVACEPipeline")),
    "sliced outputs": (2, Guided("QwenImagePipeline", "sparge")),
    "one batch": (2, Guided("CogVideoXPipeline")),
    "one batch, predicted masks": (4, Guided("CogVideoXPipeline", "sparge", "U1R2")),
    "first-block cache": (4, Guided(cache=0.3, strategy="U1R2")),
}


@pytest.mark.parametrize("name", CASES)
def test_halves_equal_one_process(threads, name):
    world, guided = CASES[name]
    for found in threads(world).run(run_guided, guided):
        assert max(found.errors) <= TOLERANCE
        assert found.effect > 100 * TOLERANCE or guided.mask == "dense", "the mask must matter"
        assert found.left == 0
        assert found.restored, "disable left something behind"
        assert found.group == world // 2
