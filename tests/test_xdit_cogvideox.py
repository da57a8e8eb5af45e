"""dbsp_xdit and CogVideoX: xfuser's own pipeline and diffusers' stock one, over 1 to 4 ranks, equal one process."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from dbsp_core.tiny import make_tiny
from xdit_cases import PipelineCase, run_cogvideox_pipeline, start_xfuser

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
HEIGHT = {1: 96, 2: 96, 3: 96, 4: 64}  # xfuser's strips: whole rows of tokens, as many on each rank


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("cogvideox", tmp_path_factory.mktemp("xdit") / "cogvideox"))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_xfusers_own_pipeline_equals_one_process(pool, tiny, world):
    workers = pool(world)
    workers.run(start_xfuser)
    for strategy in Strategy.all_for(world):
        config = {"mask": MASK, "strategy": str(strategy), "debug": True}
        for difference, again, from_dense in workers.run(
            run_cogvideox_pipeline, PipelineCase(tiny, config, HEIGHT[world])
        ):
            assert difference <= TOLERANCE, strategy
            assert again == 0, "the second generation must not depend on the first"
            assert from_dense > 100 * TOLERANCE, "the mask must matter"
