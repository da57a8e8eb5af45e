"""dbsp_xdit and CogVideoX: xfuser's own pipeline and diffusers' stock one, over 2 and 3 ranks, equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dbsp_xdit import attach, detach
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.outcomes import apart, assert_near
from tests.xdit.xdit_cases import PipelineCase, cogvideox_alone

MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
CDF = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}


def run_pipeline(rank: int, world: int, case: PipelineCase) -> None:
    dense, expected = cogvideox_alone(case)
    pipe = case.pipe(world)
    before = fingerprint(pipe.transformer)
    attach(pipe, case.config)
    out, again = case.latents(pipe), case.latents(pipe)
    detach(pipe)
    assert fingerprint(pipe.transformer) == before, "detach left something behind"
    assert_near(out, expected, dense)
    assert apart(again, out) <= 1e-6, "the second generation must not depend on the first"
    if rank == 0:
        latents = load_file(Path(case.config["report"], "latents.safetensors"))["latents"]
        assert latents.shape == (1, 4, 16, 10, 14)
        assert_near(latents, expected)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(
    ("world", "strategy", "mask", "own"),
    [(2, "U1R2", CDF, True), pytest.param(3, "auto", MASK, False, marks=pytest.mark.long)],
)
def test_pipeline_equals_one_process_and_reports_the_whole_video(xfuser, tiny, tmp_path, world, strategy, mask, own):
    """Makes 5 rows of 7 tokens, which no number of ranks divides."""
    config = {"mask": mask, "strategy": strategy, "machine": "a800", "report": str(tmp_path)}
    xfuser(world).run(run_pipeline, PipelineCase(tiny, config, height=80, width=112, own=own))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["world_size"], len(set(report["calls"]["layer"]))) == (world, 2)


def run_prompts(rank: int, world: int, case: PipelineCase) -> None:
    """Gives xfuser's own pipeline two prompts, of which this rank's group makes one."""
    _, expected = cogvideox_alone(case)
    pipe = case.pipe(world, data=2)
    attach(pipe, case.config)
    out = case.latents(pipe, prompt=["the sea at dusk"] * 2)
    detach(pipe)
    assert len(out) == 1
    assert_near(out, expected)


@pytest.mark.long
def test_prompts_distributed_by_xfuser_equal_one_process(xfuser, tiny):
    """Gives each group of ranks one of two prompts; both make the same video, by the same seed."""
    xfuser(4, 1, 2).run(run_prompts, PipelineCase(tiny, {"mask": MASK, "strategy": "U1R2"}, height=64))
