"""Step caches of diffusers and cache-dit: over any ranks, in any order, they skip what they skip in one process."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

from dbsp_core import SequenceGroup, SequenceLayout
from dbsp_diffusers.sharding.step_caches import DECIDING, IDENTICAL, ForwardRanks
from dbsp_diffusers.sharding.stream_shards import StreamShards
from tests.diffusers.cache_cases import (
    CacheCase,
    cached_before,
    important_tokens,
    rejection,
    run_cache_case,
    run_cached_pipeline,
)
from tests.xdit.xdit_cases import start_xfuser

TOLERANCE = 1e-12  # in float64
THRESHOLDS = (0.21, 0.36)
"""Each skips other steps; with the mean of the means of four ranks, which pad 105 tokens to 108, others again."""


def assert_as_in_one_process(results, skips: bool = True):
    for outcomes in results:
        *cached, disabled = outcomes
        for outcome in cached:
            assert outcome.ours == outcome.expected, outcomes
            assert outcome.difference <= TOLERANCE, outcomes
            assert outcome.effect > 1e-4, "the cache must matter"
        assert not skips or all(min(outcome.ours) < max(outcome.ours) for outcome in cached), outcomes
        assert disabled.difference <= TOLERANCE
        assert min(disabled.ours) == max(disabled.ours) == 3
    return results


@pytest.mark.parametrize(
    ("cache", "first"), [("first block", True), ("cache-dit", False)], ids=["enabled before", "enabled after"]
)
def test_decisions_by_what_has_changed_are_those_of_one_process(pool, cache, first):
    if cache == "cache-dit":
        pytest.importorskip("cache_dit")
    case = CacheCase(cache, "wan", THRESHOLDS, first, strategy="U2R2", batch=1)
    (outcomes, *_) = assert_as_in_one_process(pool(4).run(run_cache_case, case))
    assert len({tuple(outcome.ours) for outcome in outcomes[:-1]}) == len(THRESHOLDS), "each must skip other steps"


@pytest.mark.long
def test_cache_on_xfusers_own_transformer_skips_what_one_process_skips(pool):
    """Its runner puts cache-dit on after db-SP."""
    pytest.importorskip("cache_dit")
    workers = pool(4)
    workers.run(start_xfuser)
    case = CacheCase("cache-dit", "wan", (0.3,), False, strategy="U2R2", framework="xdit", batch=1)
    assert_as_in_one_process(workers.run(run_cache_case, case))


def test_passes_before_enable_or_disable_leave_nothing_in_a_cache(pool):
    for found in pool(2).run(cached_before):
        assert max(found) <= TOLERANCE, found


@pytest.mark.parametrize(
    ("cache", "first"), [pytest.param("first block", False, marks=pytest.mark.long), ("cache-dit", True)]
)
def test_cached_pipeline_equals_one_process(pool, folder, cache, first):
    """Whose two CFG passes have a cache each."""
    if cache == "cache-dit":
        pytest.importorskip("cache_dit")
    for differences, effect in pool(2).run(run_cached_pipeline, folder, cache, first):
        assert max(differences) <= 1e-6, "float32 is left in the scheduler"
        assert effect > 1e-4, "the cache must matter"


@pytest.mark.long
def test_cache_dit_left_to_itself_skips_other_steps(pool):
    """All ranks the same, by an average of the ranks' means. When this fails, db-SP need not replace it any more."""
    pytest.importorskip("cache_dit")
    case = CacheCase("cache-dit", "wan", THRESHOLDS[1:], strategy="U2R2", batch=1, left_alone=True)
    results = pool(4).run(run_cache_case, case)
    assert len({str(outcomes) for outcomes in results}) == 1
    assert all(outcomes[0].ours != outcomes[0].expected for outcomes in results)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("unknown", *["db-SP does not know whether a StrangeHook skips the same layers on all ranks"] * 2),
        ("another version", *["does not know the first-block cache in this version of diffusers"] * 2),
    ],
)
def test_cache_that_could_differ_between_ranks_is_rejected(pool, kind, before, after):
    assert_said(pool(2).run(rejection, kind), before, after)


def test_cache_dits_choice_of_single_tokens_is_rejected(pool):
    pytest.importorskip("cache_dit")
    for said in pool(2).run(important_tokens):
        assert said.startswith("UserError: cache-dit's important_condition_threshold")


def assert_said(results, *expected):
    for said in results:
        for message, part in zip(said, expected, strict=True):
            assert part in message
            assert message.startswith("UserError: ") if part else not message
            assert "\n" not in message


def test_padding_and_unequal_shards_weigh_nothing():
    """The shards of 3 and 2 tokens give the change of 5 tokens."""
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
        """A decision from data takes a number off the device: `.item()`, `float(…)` or `.tolist()`."""
        hooks = importlib.import_module("diffusers.hooks")
        for cls in heirs(hooks.ModelHook):
            if (
                cls.__name__ not in IDENTICAL
                or cls.__name__ == "FasterCacheDenoiserHook"
                or "SeaCache" in cls.__name__
            ):
                continue  # these two look at the whole input, which every rank has
            taken = [line.strip() for line in inspect.getsource(cls).splitlines() if ".item()" in line]
            printed = ["ratio = (curr_norm / (prev_norm + 1e-8)).mean().item()"]  # when calibrating, and only printed
            assert taken == (printed if cls.__name__ == "MagCacheBlockHook" else []), cls

    def test_first_block_cache_has_the_expected_names(self):
        cache = importlib.import_module("diffusers.hooks.first_block_cache")
        hook = cache.FBCHeadBlockHook(cache.StateManager(cache.FBCSharedBlockState), 0.1)
        assert list(inspect.signature(hook._should_compute_remaining_blocks).parameters) == ["hidden_states_residual"]
        assert hook.threshold == 0.1
        hook.state_manager.set_context(importlib.import_module("diffusers.hooks.hooks").CacheContext("cond"))
        assert hook.state_manager.get_state().head_block_residual is None
        assert "self._should_compute_remaining_blocks(" in inspect.getsource(cache.FBCHeadBlockHook.new_forward)

    def test_cache_dit_has_the_expected_names(self):
        pytest.importorskip("cache_dit")
        module = importlib.import_module("cache_dit.caching.cache_contexts.cache_manager")
        manager = module.CachedContextManager
        parameters = inspect.signature(manager.similarity).parameters
        assert list(parameters) == ["self", "t1", "t2", "threshold", "parallelized", "prefix"]
        assert "self.similarity(" in inspect.getsource(manager.can_cache)
        assert "cached_context.extra_cache_config.important_condition_threshold" in inspect.getsource(
            manager.get_important_condition_threshold
        )
        reductions = inspect.getsource(importlib.import_module("cache_dit.caching.cache_contexts.cache_manager"))
        assert reductions.count("dist.all_reduce(") == 2, "of `similarity`, which db-SP replaces"


def heirs(cls: type) -> set[type]:
    return {heir for child in cls.__subclasses__() for heir in (child, *heirs(child))}
