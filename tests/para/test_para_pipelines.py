"""Whole pipelines of dbsp_para: after failures, with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_para
from dbsp_cli.tiny_models import make_tiny
from dbsp_core import SequenceGroup, SequenceLayout
from dbsp_diffusers.sharding.step_caches import ForwardRanks
from dbsp_diffusers.sharding.stream_shards import StreamShards
from dbsp_para.patches import _over_real_tokens
from tests.para.test_para import para_mesh
from tests.support import user_masks
from tests.support.models.tiny_pipelines import alone, latents, load
from tests.support.outcomes import apart, assert_near
from tests.support.references import by_first_rank

pytest.importorskip("para_attn")

MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
BAND = {"source": "callable", "function": "tests.support.user_masks:band_that_may_fail", "depends_on": "step"}
BAND |= {"block_q": 8, "block_k": 8}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    return str(make_tiny("wan", tmp_path_factory.mktemp("tiny") / "wan"))


@by_first_rank
def made_alone(folder: str) -> torch.Tensor:
    return alone(load("wan", folder), {"mask": BAND})


def run_after_failures(rank: int, world: int, folder: str) -> list[str]:
    """Makes generations fail, and a right one after each. Returns how they failed on this rank."""
    pipe, expected = load("wan", folder), made_alone(folder)
    user_masks.FAILS_AT.clear()
    dbsp_para.parallelize_pipe(pipe, config={"mask": BAND})
    failures = []

    def stop(at: int) -> Any:
        def callback(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
            if step == at:
                raise KeyboardInterrupt("stopped")
            return kept

        return callback

    def fails(**options: Any) -> None:
        with pytest.raises((ValueError, KeyboardInterrupt)) as caught:
            latents(pipe, **options)
        failures.append(f"{type(caught.value).__name__}: {caught.value}")
        user_masks.FAILS_AT.clear()
        assert_near(latents(pipe), expected)

    fails(callback_on_step_end=stop(1))
    user_masks.FAILS_AT.add((1, 2))  # a step whose masks are not kept from the videos before
    fails(num_inference_steps=3)
    dbsp_para.unparallelize(pipe)
    return failures


def test_pipeline_after_a_failed_generation_equals_one_process(pool, wan):
    for failures in pool(2).run(run_after_failures, wan):
        stopped, failed = failures
        assert stopped == "KeyboardInterrupt: stopped"
        assert failed.startswith("UserError: rank(s) [1]"), failed
        assert "set to fail" in failed


STEPS, CACHE = {"num_inference_steps": 6}, {"residual_diff_threshold": 0.25}


@by_first_rank
def cached_alone(folder: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Returns one process's video without the cache and with it, and layers computed at each pass.

    In float64: after six steps, latents of 11 have been rounded to within 1.5e-5 in float32.
    """
    from para_attn.first_block_cache.diffusers_adapters import apply_cache_on_pipe

    pipe = load("wan", folder).to(torch.float64)
    uncached = alone(pipe, {"mask": MASK}, **STEPS)
    apply_cache_on_pipe(pipe, **CACHE)
    passes = _count_layers(pipe.transformer)
    return uncached, alone(pipe, {"mask": MASK}, **STEPS), passes()


def run_cached(rank: int, world: int, folder: str, cache_first: bool) -> list[int]:
    """Runs a pipeline with para-attn's first-block cache. Returns the layers computed at each pass."""
    from para_attn.first_block_cache.diffusers_adapters import apply_cache_on_pipe

    uncached, expected, expected_passes = cached_alone(folder)
    config, mesh = {"mask": MASK}, para_mesh(world, max_ring_dim_size=2)
    pipe = load("wan", folder).to(torch.float64)
    if cache_first:
        apply_cache_on_pipe(pipe, **CACHE)
    dbsp_para.parallelize_pipe(pipe, mesh=mesh, config=config)
    if not cache_first:
        apply_cache_on_pipe(pipe, **CACHE)
    passes = _count_layers(pipe.transformer)
    out, found = latents(pipe, **STEPS), passes()
    dbsp_para.unparallelize(pipe)
    assert_near(out, expected, uncached)
    assert found == expected_passes
    assert apart(alone(pipe, config, **STEPS), expected) <= 1e-6, "the cache goes on without db-SP"
    return found


def _count_layers(transformer: torch.nn.Module) -> Any:
    """Counts blocks run in each pass from now on; call the result to read and stop."""
    counts: list[int] = []

    def another(*_: Any) -> None:
        counts[-1] += 1

    handles = [transformer.register_forward_pre_hook(lambda *_: counts.append(0))]
    handles += [block.register_forward_hook(another) for block in transformer.blocks]

    def read() -> list[int]:
        for handle in handles:
            handle.remove()
        return counts

    return read


@pytest.mark.parametrize("cache_first", [True, pytest.param(False, marks=pytest.mark.long)])
def test_first_block_cache_skips_what_one_process_skips(pool, wan, cache_first):
    for passes in pool(2).run(run_cached, wan, cache_first):
        assert 1 in passes[1:], "some passes must be skipped after the first block"
        assert max(passes[1:]) > 1, "and some not"


def test_ranks_decide_identically_where_stock_averages_would_not():
    """Decides for 5 tokens in shards of 3 and 2; sums are in tests/diffusers/test_step_caches.py."""
    video = StreamShards(SequenceLayout.contiguous(5, 2), SequenceGroup(1, 2), 0, 5)
    before = video.take(torch.ones(1, 5, 4), dim=1)
    now = before * 1.1
    now[:, 2] = 50.0
    ranks = ForwardRanks(SequenceGroup(0, 1), lambda: video, tuple)
    similar = _over_real_tokens(lambda *_, **__: pytest.fail("para-attn's own must not be asked"))
    assert similar(before, now, threshold=0.11, parallelized=ranks)
    assert not similar(before, now, threshold=0.09, parallelized=ranks)
    assert not similar(before, before, threshold=0.0, parallelized=ranks)
