"""dbsp_xdit and CogVideoX: xfuser's own pipeline and diffusers' stock one, over 1 to 4 ranks, equal one process."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from dbsp_cli.tiny_models import make_tiny
from dbsp_core import Strategy
from tests.xdit.xdit_cases import PipelineCase, expected_latents, run_cogvideox_pipeline, start_xfuser

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
CDF = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}
HEIGHT = {1: 96, 2: 96, 3: 96, 4: 64}  # xfuser's strips: whole rows of tokens, as many on each rank


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("cogvideox", tmp_path_factory.mktemp("xdit") / "cogvideox"))


def assert_equal(workers, case, some=False):
    results = workers.run(run_cogvideox_pipeline, case)
    assert any(results) if some else all(results)
    for difference, again, from_dense in filter(None, results):
        assert difference <= TOLERANCE, case
        assert again <= TOLERANCE / 10, "the second generation must not depend on the first"
        assert from_dense > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_xfusers_own_pipeline_equals_one_process(pool, tiny, world):
    """Text of 226 tokens is split over 2 ranks, and all of it on each of 3 and 4."""
    workers = pool(world)
    workers.run(start_xfuser)
    for strategy in Strategy.all_for(world):
        config = {"mask": MASK, "strategy": str(strategy), "debug": True}
        assert_equal(workers, PipelineCase(tiny, config, HEIGHT[world]), some=True)
    for config in ({"mask": CDF, "strategy": str(strategy)}, {"mask": MASK, "strategy": "auto", "cost_model": "a800"}):
        assert_equal(workers, PipelineCase(tiny, config, HEIGHT[world]), some=True)


@pytest.mark.parametrize("guidance", [1, 2])
def test_a_script_leaves_a_report_of_the_whole_video(pool, tiny, tmp_path, guidance):
    workers = pool(4)
    workers.run(start_xfuser, guidance)
    config = {"mask": MASK, "strategy": f"U1R{4 // guidance}", "report": str(tmp_path / "report")}
    case = PipelineCase(tiny, config, height=64, guidance=guidance)
    assert_equal(workers, case, some=True)
    latents = load_file(tmp_path / "report" / "latents.safetensors")["latents"]
    assert latents.shape == (1, 4, 16, 8, 12)
    assert float((latents - expected_latents(case)).abs().max()) <= TOLERANCE
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["world_size"], len(report["layers"])) == (4 // guidance, 2)


def test_a_wrong_order_of_strips_would_be_seen(pool, tiny):
    workers = pool(2)
    workers.run(start_xfuser)
    case = PipelineCase(tiny, {"mask": MASK, "strategy": "U1R2"}, height=96, strips_ignored=True)
    assert any(result and result[0] > 100 * TOLERANCE for result in workers.run(run_cogvideox_pipeline, case))


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.long)])
def test_the_stock_pipeline_equals_one_process(pool, tiny, world):
    """5 rows of 7 tokens, which no number of ranks divides, and 4 or 6 heads over 3 or 4 ranks."""
    workers = pool(world)
    workers.run(start_xfuser)
    for strategy in Strategy.all_for(world):
        for mask, layout in ((MASK, "striped"), (CDF, "contiguous")):
            config = {"mask": mask, "strategy": str(strategy), "layout": layout, "debug": True}
            assert_equal(workers, PipelineCase(tiny, config, height=80, width=112, own=False))


@pytest.mark.parametrize("world", [2, 4])
def test_guidance_in_parallel_equals_one_process(pool, tiny, world):
    workers = pool(world)
    workers.run(start_xfuser, 2)
    for mask, strategy in ((MASK, f"U{world // 2}R1"), (CDF, f"U1R{world // 2}")):
        config = {"mask": mask, "strategy": strategy, "debug": True}
        assert_equal(workers, PipelineCase(tiny, config, height=96, guidance=2), some=True)
