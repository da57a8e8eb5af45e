"""Wan2.2 and its relatives as whole pipelines: two transformers, a timestep for each token, images, VACE."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from tests.diffusers.models.wan22_cases import MASK, latents, make_pipe, one_process
from tests.support.outcomes import apart, assert_near

LAYERS = 2
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 16}
BRIEF = {"num_inference_steps": 2, "max_sequence_length": 16, "num_frames": 5}
"""Of Wan2.2's two transformers, each has one of the steps."""
LONGER = {"max_sequence_length": 16, "num_frames": 5}


def run_kind(rank: int, world: int, kind: str, folder: str, config: dict[str, Any]) -> None:
    dense, expected = one_process(kind, folder, config, BRIEF)
    pipe, options = make_pipe(kind, folder)
    dbsp_diffusers.enable(pipe, config)
    assert_near(latents(pipe, options, **BRIEF), expected, dense)
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.sessions_of(pipe) == {}
    assert apart(latents(pipe, options, **BRIEF), dense) == 0


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        pytest.param("a14b", SPARGE, marks=pytest.mark.long),  # with masks that are not predicted: below
        ("ti2v of an image", SPARGE),
        ("i2v of Wan2.1", MASK),
        ("vace with references", SPARGE),
    ],
    ids=lambda part: part if isinstance(part, str) else part["source"],
)
def test_pipeline_equals_one_process(pool, folder, kind, mask):
    pool(2).run(run_kind, kind, folder, {"mask": mask, "strategy": "U1R2"})


def run_both(rank: int, world: int, folder: str, where: str) -> None:
    """Runs Wan2.2's two transformers twice, with masks and recordings of each."""
    config: dict[str, Any] = {"mask": MASK, "strategy": "U1R2", "dense_schedule": {"first_steps": 2, "last_steps": 1}}
    config |= {"transformer_2": {"mask": MASK | {"seed": 9}}}
    _, expected = one_process("a14b", folder, config, LONGER)
    pipe, _ = make_pipe("a14b", folder)
    own = replace(DbspConfig.load(config | {"report": f"{where}/report"}), record=f"{where}/masks")
    dbsp_diffusers.enable(pipe, own)
    sessions = dbsp_diffusers.sessions_of(pipe)
    assert list(sessions) == ["transformer", "transformer_2"]
    assert dbsp_diffusers.session_of(pipe.transformer_2) is sessions["transformer_2"]
    assert sessions["transformer_2"].config.mask == replace(sessions["transformer"].config.mask, seed=9)
    for _ in range(2):
        assert_near(latents(pipe, LONGER), expected)
    dbsp_diffusers.disable(pipe.transformer_2)  # and with it the first
    assert dbsp_diffusers.session_of(pipe) is None


def test_two_transformers_share_steps_and_a_report(pool, folder, tmp_path):
    """Gives the first the steps before the boundary. Dense are the first two and the last one of all, not of each."""
    pool(2).run(run_both, folder, str(tmp_path))
    assert sorted(path.name for path in Path(tmp_path, "masks").iterdir()) == ["transformer", "transformer_2"]
    report = json.loads(Path(tmp_path, "report", "report.json").read_text(encoding="utf-8"))
    assert report["model"].endswith(f", layers {LAYERS} to {2 * LAYERS - 1}: transformer_2")
    calls = report["calls"]
    assert set(calls["layer"]) == set(range(2 * LAYERS))
    seen = sorted(set(zip(calls["step"], [layer >= LAYERS for layer in calls["layer"]], strict=True)))
    assert [step for step, _ in seen] == [0, 1, 2, 3], "each step is one transformer's"
    assert [second for _, second in seen] == sorted(second for _, second in seen)
    assert {second for _, second in seen} == {False, True}
    dense = {step for step, density in zip(calls["step"], calls["density"], strict=True) if density == 1.0}
    assert dense == {0, 1, 3}
    assert set(calls["branch"]) == {0, 1}
    assert len(calls["step"]) == 4 * 2 * LAYERS, "of the last call alone"
