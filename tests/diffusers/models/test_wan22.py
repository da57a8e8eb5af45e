"""Wan2.2 and its relatives as whole pipelines: two transformers, a timestep for each token, images, VACE."""

from __future__ import annotations

import pytest

from tests.diffusers.models.wan22_cases import MASK, run_both, run_kind

TOLERANCE = 1e-5
LAYERS = 2
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 16}


@pytest.mark.parametrize(
    ("kind", "mask"),
    [
        pytest.param("a14b", SPARGE, marks=pytest.mark.long),  # with masks that are not predicted: below
        pytest.param("ti2v", MASK, marks=pytest.mark.long),
        ("ti2v of an image", SPARGE),
        ("i2v of Wan2.1", MASK),
        pytest.param("i2v of Wan2.2", MASK, marks=pytest.mark.long),
        ("vace with references", SPARGE),
    ],
    ids=lambda part: part if isinstance(part, str) else part["source"],
)
def test_pipeline_equals_one_process(pool, folder, kind, mask):
    for from_single, from_dense, left in pool(2).run(run_kind, kind, folder, {"mask": mask, "strategy": "U1R2"}):
        assert from_single <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
        assert left == 0


def test_two_transformers_share_steps_and_a_report(pool, folder, tmp_path):
    """The first takes the steps before the boundary. Dense are the first two and the last one of all, not of each."""
    results = pool(2).run(run_both, folder, str(tmp_path))
    assert all(from_single <= TOLERANCE for from_single, _, _ in results)
    _, report, folders = results[0]
    assert folders == ["transformer", "transformer_2"]
    assert report["model"].endswith(f", layers {LAYERS} to {2 * LAYERS - 1}: transformer_2")
    assert set(report["calls"]["layer"]) == set(range(2 * LAYERS))
    calls = report["calls"]
    seen = sorted(set(zip(calls["step"], [layer >= LAYERS for layer in calls["layer"]], strict=True)))
    steps = [step for step, _ in seen]
    assert steps == [0, 1, 2, 3], "each step is one transformer's"
    assert [second for _, second in seen] == sorted(second for _, second in seen)
    assert {second for _, second in seen} == {False, True}
    dense = {step for step, density in zip(calls["step"], calls["density"], strict=True) if density == 1.0}
    assert dense == {0, 1, 3}
    assert set(calls["branch"]) == {0, 1}
    assert len(calls["step"]) == 4 * 2 * LAYERS, "of the last call alone"
