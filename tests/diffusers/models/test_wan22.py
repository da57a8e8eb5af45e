"""Wan2.2's two transformers in one pipeline: their steps, masks, recordings and report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from tests.support.models.tiny_pipelines import alone, latents, make_wan22
from tests.support.outcomes import assert_near
from tests.support.references import by_first_rank

LAYERS = 2
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}
BRIEF = {"num_frames": 5, "num_inference_steps": 4}


@by_first_rank
def one_process(folder: str, config: dict[str, Any]) -> torch.Tensor:
    return alone(make_wan22("a14b", folder), config, **BRIEF)


def run_both(rank: int, world: int, folder: str, where: str) -> None:
    """Runs Wan2.2's two transformers twice, with masks and recordings of each."""
    config: dict[str, Any] = {"mask": MASK, "strategy": "U1R2", "dense_schedule": {"first_steps": 2, "last_steps": 1}}
    config |= {"transformer_2": {"mask": MASK | {"seed": 9}}}
    expected, pipe = one_process(folder, config), make_wan22("a14b", folder)
    own = replace(DbspConfig.load(config | {"report": f"{where}/report"}), record=f"{where}/masks")
    dbsp_diffusers.enable(pipe, own)
    sessions = dbsp_diffusers.sessions_of(pipe)
    assert list(sessions) == ["transformer", "transformer_2"]
    assert dbsp_diffusers.session_of(pipe.transformer_2) is sessions["transformer_2"]
    assert sessions["transformer_2"].config.mask == replace(sessions["transformer"].config.mask, seed=9)
    for _ in range(2):
        assert_near(latents(pipe, **BRIEF), expected)
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
