"""dbsp_xdit and CogVideoX: xfuser's own pipeline and diffusers' stock one, over 2 and 3 ranks, equal one process."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from dbsp_cli.tiny_models import make_tiny
from tests.xdit.xdit_cases import PipelineCase, expected_latents, run_cogvideox_pipeline, run_prompts, start_xfuser

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
CDF = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(make_tiny("cogvideox", tmp_path_factory.mktemp("xdit") / "cogvideox"))


def assert_equal(workers, case):
    for difference, again, from_dense in workers.run(run_cogvideox_pipeline, case):
        assert difference <= TOLERANCE, case
        assert again <= TOLERANCE / 10, "the second generation must not depend on the first"
        assert from_dense > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("world", "strategy", "mask", "own"),
    [
        (2, "U1R2", CDF, True),
        pytest.param(3, "auto", MASK, False, marks=pytest.mark.long),
    ],
)
def test_pipeline_equals_one_process_and_reports_the_whole_video(pool, tiny, tmp_path, world, strategy, mask, own):
    """5 rows of 7 tokens, which no number of ranks divides."""
    workers = pool(world)
    workers.run(start_xfuser)
    config = {"mask": mask, "strategy": strategy, "machine": "a800", "report": str(tmp_path / "report")}
    case = PipelineCase(tiny, config, height=80, width=112, own=own)
    assert_equal(workers, case)
    latents = load_file(tmp_path / "report" / "latents.safetensors")["latents"]
    assert latents.shape == (1, 4, 16, 10, 14)
    assert float((latents - expected_latents(case)).abs().max()) <= TOLERANCE
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert (report["world_size"], len(set(report["calls"]["layer"]))) == (world, 2)


@pytest.mark.long
def test_prompts_distributed_by_xfuser_equal_one_process(pool, tiny):
    """Each group of ranks is given one of two prompts; both make the same video, by the same seed."""
    workers = pool(4)
    workers.run(start_xfuser, 1, 2)
    found = workers.run(run_prompts, PipelineCase(tiny, {"mask": MASK, "strategy": "U1R2"}, height=64))
    workers.run(start_xfuser)
    for batch, difference in found:
        assert batch == 1
        assert difference <= TOLERANCE
