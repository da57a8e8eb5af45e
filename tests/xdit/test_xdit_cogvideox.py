"""dbsp_xdit and CogVideoX: xfuser's own pipeline over 2 ranks equals one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dbsp_xdit import attach, detach
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.outcomes import apart, assert_near
from tests.xdit.xdit_cases import PipelineCase, cogvideox_alone


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
def test_pipeline_equals_one_process_and_reports_the_whole_video(xfuser, tiny, tmp_path):
    """Makes 5 rows of 7 tokens, which no number of ranks divides."""
    mask = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}
    xfuser(2).run(run_pipeline, PipelineCase(tiny, {"mask": mask, "strategy": "U1R2", "report": str(tmp_path)}))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["world_size"], len(set(report["calls"]["layer"]))) == (2, 2)
