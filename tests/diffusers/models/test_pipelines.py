"""Whole pipelines of each model on two ranks, against one process."""

from __future__ import annotations

import pytest

from tests.diffusers.models.pipeline_cases import CASES, marked, run_pipeline

TOLERANCE = 1e-5
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 4, "block_k": 4, "dense_text": False}
FIXED = {"source": "synthetic", "density": 0.4, "block_q": 4, "block_k": 4}
"""For LTX-2: guidance in three ways multiplies rounding, after which a predicted block may be another one."""


@pytest.mark.parametrize("place", [marked(case, place) for place, case in enumerate(CASES)])
def test_a_pipeline_equals_one_process(pool, place):
    mask = FIXED if CASES[place].pipeline.startswith("LTX2") else SPARGE
    config = {"mask": mask, "strategy": "U1R2"}
    for from_single, from_dense in pool(2).run(run_pipeline, place, config):
        assert from_single <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
