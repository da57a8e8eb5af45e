"""Step caches of diffusers and cache-dit: over any ranks, in any order, they skip what they skip in one process."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook

import dbsp_diffusers
from dbsp_core import SequenceGroup, SequenceLayout
from dbsp_diffusers.sharding.step_caches import DECIDING, IDENTICAL, ForwardRanks
from dbsp_diffusers.sharding.stream_shards import StreamShards
from tests.diffusers.cache_cases import CACHES, Denoising, cache_dit_config
from tests.support.gradients import in_float64
from tests.support.models.tiny_pipelines import attach_pipeline, fingerprint, latents, make_wan22
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart, assert_near, outputs, said
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 8}
THRESHOLDS = (0.21, 0.36)
"""Each skips other steps; with the mean of the means of four ranks, which pad 105 tokens to 108, others again."""
Computed = list[int]
"""Number of blocks that each pass computes."""


def denoising() -> Denoising:
    """Returns six steps of a transformer of three layers in float64; `THRESHOLDS` are chosen for these inputs."""
    transformer = make_tiny_transformer("wan", num_layers=3)
    draws = torch.Generator().manual_seed(1)
    text, video = (torch.randn(1, *size, generator=draws) for size in ((7, 16), (4, 3, 10, 14)))
    inputs = tiny_inputs("wan") | {"encoder_hidden_states": text, "hidden_states": video}
    return Denoising(transformer.double(), in_float64(inputs), 6)


@shared  # on every rank: cache-dit's decisions are collective even in one process's run
def one_process(cache: str, thresholds: tuple[float, ...]) -> list[tuple[torch.Tensor, Computed]]:
    """Returns the last sample and the blocks computed, without a cache and for each threshold."""
    reference, found = denoising(), []
    attach_single_process(reference.transformer, {"mask": MASK})
    for threshold in (None, *thresholds):
        if threshold is not None:
            CACHES[cache].enable(reference.transformer, threshold)
        samples, computed = reference.run()
        found.append((samples[-1], computed))
        if threshold is not None:
            CACHES[cache].disable(reference.transformer)
    return found


def run_decisions(rank: int, world: int, cache: str, first: bool, thresholds: tuple[float, ...]) -> list[Computed]:
    """Denoises once for each threshold, with the cache enabled before db-SP or after it, and at last without a cache.

    Returns the blocks computed, by threshold.
    """
    (uncached, every), *references = one_process(cache, thresholds)
    ours, caches, found = denoising(), CACHES[cache], []
    config, model = {"mask": MASK, "strategy": "U2R2"}, ours.transformer
    caches.enable(model, 0.0)
    caches.disable(model)  # which leaves a trace of its own: each forward as an attribute
    before = traces(model)
    if not first:
        dbsp_diffusers.enable(model, config)
    for threshold, (expected, passes) in zip(thresholds, references, strict=True):
        caches.enable(model, threshold)
        if first:
            dbsp_diffusers.enable(model, config)
        samples, computed = ours.run()
        found.append(computed)
        assert computed == passes
        assert_near(samples[-1], expected, tolerance=1e-12)  # in float64
        assert apart(uncached, expected) > 1e-4, "the cache must matter"
        if first:
            dbsp_diffusers.disable(model)
        caches.disable(model)
    if first:
        dbsp_diffusers.enable(model, config)
    samples, computed = ours.run()
    assert_near(samples[-1], uncached, tolerance=1e-12)
    assert computed == every == [3] * 6
    dbsp_diffusers.disable(model)
    assert traces(model) == before
    return found


def traces(transformer: torch.nn.Module) -> list[Any]:
    """Returns what is left on a transformer, in one order: cache-dit puts blocks back as the last part.

    diffusers leaves its registries when a cache is disabled.
    """
    for module in transformer.modules():
        vars(module).pop("_diffusers_hook", None)
    return sorted(fingerprint(transformer), key=lambda part: part[0])


@pytest.mark.parametrize(
    ("cache", "first", "thresholds"),
    [("first block", True, THRESHOLDS), ("cache-dit", False, THRESHOLDS[:1])],
    ids=["enabled before", "enabled after"],
)
def test_decisions_by_what_has_changed_are_those_of_one_process(pool, cache, first, thresholds):
    if cache == "cache-dit":
        pytest.importorskip("cache_dit")
    for found in pool(4).run(run_decisions, cache, first, thresholds):
        assert all(min(computed) < max(computed) for computed in found)
        assert len(set(map(tuple, found))) == len(thresholds), "each must skip other steps"


@torch.no_grad()
def cached_before(rank: int, world: int) -> None:
    """Runs a pass after `enable`, and one after `disable`, with a cache that skips all it can.

    What it kept of earlier passes are tensors of other tokens, made with another mask.
    """
    ours, config = denoising(), {"mask": MASK}

    def one_pass() -> list[torch.Tensor]:
        with ours.transformer.cache_context("cond"):
            return outputs(ours.transformer, ours.inputs)

    dense = one_pass()
    single = attach_single_process(ours.transformer, config)
    sparse = one_pass()
    single.detach()
    CACHES["first block"].enable(ours.transformer, 1e9)
    one_pass()
    dbsp_diffusers.enable(ours.transformer, config)
    assert_near(one_pass(), sparse, dense, tolerance=1e-12)
    dbsp_diffusers.disable(ours.transformer)
    assert_near(one_pass(), dense, tolerance=1e-12)


def test_passes_before_enable_or_disable_leave_nothing_in_a_cache(pool):
    pool(2).run(cached_before)


def cached_experts(folder: str, cached: bool, attach: Callable[[Any], object]) -> torch.Tensor:
    """Returns the latents of Wan2.2's two transformers, which have one manager of cache-dit's, in float64."""
    import cache_dit

    pipe = make_wan22("a14b", folder)
    pipe.__class__ = type("WanPipelineUnderTest", (type(pipe),), {})  # cache-dit changes the class
    pipe.to(torch.float64)
    if cached:
        cache_dit.enable_cache(pipe, cache_config=cache_dit_config(0.3))
    attach(pipe)
    made = latents(pipe, num_inference_steps=8, num_frames=5)
    dbsp_diffusers.disable(pipe)
    return made


@shared
def experts_alone(folder: str) -> list[torch.Tensor]:
    """Returns what one process makes without the cache, and with it."""
    attach = functools.partial(attach_pipeline, config={"mask": MASK})
    return [cached_experts(folder, cached, attach) for cached in (False, True)]


def run_cached_experts(rank: int, world: int, folder: str) -> None:
    uncached, expected = experts_alone(folder)
    enable = functools.partial(dbsp_diffusers.enable, config={"mask": MASK})
    assert_near(cached_experts(folder, True, enable), expected, uncached, tolerance=1e-6)  # float32 in the scheduler


@pytest.mark.long
def test_cache_that_two_transformers_share_equals_one_process(pool, folder):
    """Runs two CFG passes, which have a cache each."""
    pytest.importorskip("cache_dit")
    pool(2).run(run_cached_experts, folder)


def _put_strange_hook(transformer: Any) -> None:
    strange = type("StrangeHook", (ModelHook,), {"new_forward": lambda self, *_, **__: None})
    HookRegistry.check_if_exists_or_initialize(transformer.blocks[1]).register_hook(strange(), "strange")


def _put_cache_of_another_version(transformer: Any) -> None:
    CACHES["first block"].enable(transformer, 0.2)
    del transformer.blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"].threshold


UNKNOWN = {
    "unknown": (_put_strange_hook, "db-SP does not know whether a StrangeHook skips the same layers on all ranks"),
    "another version": (
        _put_cache_of_another_version,
        "db-SP does not know whether a FBCHeadBlockHook skips the same layers on all ranks",
    ),
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("kind", UNKNOWN)
def test_cache_that_could_differ_between_ranks_is_rejected(threads, kind, first):
    def rejection(rank: int, world: int) -> str:
        ours, (put_on, _) = denoising(), UNKNOWN[kind]
        if first:
            put_on(ours.transformer)
            return said(lambda: dbsp_diffusers.enable(ours.transformer, {"mask": MASK}))
        dbsp_diffusers.enable(ours.transformer, {"mask": MASK})
        put_on(ours.transformer)
        return said(ours.run)

    for answer in threads(2).run(rejection):
        assert answer.startswith(f"UserError: {UNKNOWN[kind][1]}")


def important_tokens(rank: int, world: int) -> None:
    """Lets cache-dit decide by single tokens."""
    ours = denoising()
    dbsp_diffusers.enable(ours.transformer, {"mask": MASK})
    CACHES["cache-dit"].enable(ours.transformer, 0.2)
    for context in ours.transformer._context_manager._cached_context_manager.values():
        context.extra_cache_config.important_condition_threshold = 0.1
    assert said(ours.run).startswith("UserError: db-SP does not know whether cache-dit with important_")
    CACHES["cache-dit"].disable(ours.transformer)


def test_cache_dits_choice_of_single_tokens_is_rejected(pool):
    pytest.importorskip("cache_dit")
    pool(2).run(important_tokens)


def test_padding_and_unequal_shards_weigh_nothing():
    """Expects the change of 5 tokens from shards of 3 and 2 tokens."""
    video = StreamShards(SequenceLayout.contiguous(5, 2), SequenceGroup(1, 2), 0, 5)
    before = video.take(torch.ones(1, 5, 4), dim=1)
    now = before * 1.5
    now[:, 2] = 50.0
    assert video.tokens_here == 2
    together = ForwardRanks(SequenceGroup(0, 1), lambda: video, tuple)
    assert together.change(before, now) == (4.0, 8.0)
    with pytest.raises(ValueError, match="shards of 3 tokens"):
        together.change(before[:, :2], now[:, :2])


class TestWhatIsKnownOfOtherLibraries:
    """Fails where another version has it otherwise: sharding/step_caches.py must then be looked at again."""

    def test_hooks_of_diffusers_that_may_skip_are_known(self):
        hooks = importlib.import_module("diffusers.hooks")
        for module in pkgutil.iter_modules(hooks.__path__):
            importlib.import_module(f"diffusers.hooks.{module.name}")
        named = {cls.__name__ for cls in heirs(hooks.ModelHook) if cls.__module__.startswith("diffusers.hooks.")}
        skipping = {cls.__name__ for cls in heirs(hooks.ModelHook) if hasattr(cls, "new_forward")}
        assert {DECIDING, *IDENTICAL} <= named
        unsupported = {name for name in skipping if name in named} - {DECIDING, *IDENTICAL}
        assert unsupported == {"AttentionProcessorSkipHook"}

    def test_hooks_of_diffusers_that_look_at_data_are_known(self):
        """Looks for decisions from data, which take a number off the device: `.item()`, `float(…)` or `.tolist()`."""
        hooks = importlib.import_module("diffusers.hooks")
        for cls in heirs(hooks.ModelHook):
            whole_input = cls.__name__ == "FasterCacheDenoiserHook" or "SeaCache" in cls.__name__
            if cls.__name__ not in IDENTICAL or whole_input:  # which every rank has
                continue
            taken = [line.strip() for line in inspect.getsource(cls).splitlines() if ".item()" in line]
            printed = ["ratio = (curr_norm / (prev_norm + 1e-8)).mean().item()"]  # when calibrating, and only printed
            assert taken == (printed if cls.__name__ == "MagCacheBlockHook" else []), cls


def heirs(cls: type) -> set[type]:
    return {heir for child in cls.__subclasses__() for heir in (child, *heirs(child))}
