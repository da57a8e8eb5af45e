"""dbsp_para: whole pipelines make one video for any ranks, one after the other, after failures, with a cache."""

from __future__ import annotations

import pytest
import torch

from dbsp_cli.tiny_models import make_tiny
from tests.para.para_pipeline_cases import (
    run_after_failures,
    run_cached,
    run_generations,
    run_pipeline,
    run_two_of_a_class,
)
from tests.support.models.shallow import make_shallow

pytest.importorskip("para_attn")

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
BAND = {
    "source": "callable",
    "function": "tests.support.user_masks:band_that_may_fail",
    "depends_on": "step",
    "block_q": 8,
    "block_k": 8,
}
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": -1.0, "block_q": 8, "block_k": 8}
MODELS = ("wan", "cogvideox")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {model: make_shallow(model, tmp_path_factory.mktemp("tiny") / model) for model in MODELS}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """With four layers in Wan, so that a cache may skip most of them."""
    return {model: str(make_tiny(model, tmp_path_factory.mktemp("deep") / model)) for model in MODELS}


@pytest.mark.parametrize(
    ("model", "world", "mesh", "through"),
    [
        ("wan", 2, {"max_ring_dim_size": 2}, "dbsp_para"),
        ("cogvideox", 2, {"max_ring_dim_size": 1}, "para_attn"),
    ],
)
def test_pipeline_on_any_number_of_ranks_equals_one_process(pool, folders, model, world, mesh, through):
    options = (model, folders[model], {"mask": MASK}, mesh, through)
    results = pool(world).run(run_pipeline, *options)
    for from_single, from_dense, _ in results:
        assert from_single <= TOLERANCE, results
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
    assert len({total for *_, total in results}) == 1, "ranks must share their noise"


def test_two_pipelines_of_a_class_equal_one_process(pool, folders, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("mask: {source: synthetic, density: 0.3, block_q: 16, block_k: 8}\n")
    pool(2).run(run_two_of_a_class, folders["wan"], str(file))


@pytest.mark.parametrize(
    ("model", "mask"),
    [("wan", BAND), pytest.param("cogvideox", SPARGE, marks=pytest.mark.long)],
    ids=["wan-band", "cogvideox-sparge"],
)
def test_generation_after_another_equals_one_process(pool, folders, model, mask):
    for differences in pool(2).run(run_generations, model, folders[model], {"mask": mask, "strategy": "U1R2"}):
        assert max(differences) <= TOLERANCE, differences


@pytest.mark.parametrize(("model", "world"), [pytest.param("wan", 3, marks=pytest.mark.long), ("cogvideox", 2)])
def test_pipeline_after_a_failed_generation_equals_one_process(pool, folders, model, world):
    results = pool(world).run(run_after_failures, model, folders[model], {"mask": BAND})
    for rank, (failures, differences) in enumerate(results):
        assert max(differences) <= TOLERANCE, (rank, differences)
        assert failures[:2] == ["KeyboardInterrupt: stopped"] * 2
        for failure in failures[2:]:
            assert failure.startswith("UserError: rank(s) [1]"), failure
            assert "set to fail" in failure


@pytest.mark.parametrize(
    ("model", "world", "mesh", "cache_first", "threshold"),
    [
        ("wan", 2, {"max_ring_dim_size": 2}, True, 0.25),
        pytest.param("cogvideox", 4, {"max_ring_dim_size": 2}, False, 0.5, marks=pytest.mark.long),
    ],
)
def test_first_block_cache_skips_what_one_process_skips(pool, deep, model, world, mesh, cache_first, threshold):
    config = {"mask": MASK}
    cache = {"residual_diff_threshold": threshold}
    results = pool(world).run(run_cached, model, deep[model], config, cache, cache_first, mesh)
    for from_single, from_uncached, expected, passes in results:
        assert passes == expected
        assert 1 in passes[1:], "some passes must be skipped after the first block"
        assert max(passes[1:]) > 1, "and some not"
        assert from_single <= TOLERANCE, results
        assert from_uncached > 100 * TOLERANCE, "skipping must matter"


def test_ranks_decide_identically_where_stock_averages_would_not():
    """Padding and unequal shards weigh nothing: two shards of 3 and 2 tokens give the decision of 5 tokens."""
    from dbsp_core import SequenceGroup, SequenceLayout
    from dbsp_diffusers.sharding.step_caches import ForwardRanks
    from dbsp_diffusers.sharding.stream_shards import StreamShards
    from dbsp_para.patches import _over_real_tokens

    video = StreamShards(SequenceLayout.contiguous(5, 2), SequenceGroup(1, 2), 0, 5)
    whole = torch.ones(1, 5, 4)
    before = video.take(whole, dim=1)
    now = before * 1.1
    now[:, 2] = 50.0
    alone = ForwardRanks(SequenceGroup(0, 1), lambda: video, tuple)
    similar = _over_real_tokens(lambda *_, **__: pytest.fail("para-attn's own must not be asked"))
    assert video.tokens_here == 2
    assert similar(before, now, threshold=0.11, parallelized=alone)
    assert not similar(before, now, threshold=0.09, parallelized=alone)
    assert not similar(before, before, threshold=0.0, parallelized=alone)
