"""What the workers run: step caches of diffusers and cache-dit on parallelized transformers, against one process."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

import dbsp_para
from dbsp_diffusers.sharding.step_caches import StepCaches
from tests.support.models.tiny_pipelines import alone, fingerprint, latents, load
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 8}


@dataclass(frozen=True)
class CacheCase:
    """A few denoising steps in float64, once for each threshold, with the cache enabled before or after db-SP.

    Attributes:
        cache: A name in `CACHES`.
        framework: "para", or "xdit" with its own transformer.
        left_alone: Whether cache-dit decides by itself.
    """

    cache: str
    model: str
    thresholds: tuple[float, ...] = (0.0,)
    first: bool = False
    strategy: str = "U2R1"
    framework: str = "para"
    batch: int = 2
    steps: int = 6
    left_alone: bool = False

    @property
    def alone(self) -> CacheCase:
        """What is denoised, whichever way: equal for cases with one reference."""
        return CacheCase(self.cache, self.model, self.thresholds, batch=self.batch, steps=self.steps)


@dataclass(frozen=True)
class Cache:
    """enable(transformer, threshold) and disable(transformer)."""

    enable: Callable[[Any, float], None]
    disable: Callable[[Any], None] = lambda transformer: transformer.disable_cache()


def _first_block(transformer: Any, threshold: float) -> None:
    from diffusers.hooks import FirstBlockCacheConfig

    transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))


def _cache_dit(transformer: Any, threshold: float) -> None:
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "ERROR")
    import cache_dit

    adapter = cache_dit.BlockAdapter(
        pipe=None,
        transformer=transformer,
        blocks=transformer.blocks,
        forward_pattern=cache_dit.ForwardPattern.Pattern_2,
        check_forward_pattern=False,
        has_separate_cfg=False,
    )
    config = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 1, "num_inference_steps": 6}
    cache_dit.enable_cache(adapter, cache_config=cache_dit.DBCacheConfig(**config, residual_diff_threshold=threshold))


def _without_cache_dit(transformer: Any) -> None:
    import cache_dit

    cache_dit.disable_cache(transformer)


CACHES = {
    "first block": Cache(_first_block),
    "cache-dit": Cache(_cache_dit, _without_cache_dit),
}


class Denoising:
    """Steps of a transformer alone, in which it changes its input by less and less."""

    def __init__(self, case: CacheCase) -> None:
        self.case = case
        self.inputs = Inputs.random(case.model, (3, 5, 7), case.batch, 7).arguments
        for name, value in self.inputs.items():
            self.inputs[name] = _in_float64(value)
        self.transformer = make_transformer(case.model, num_layers=3).double()

    def enable(self, threshold: float) -> None:
        CACHES[self.case.cache].enable(self.transformer, threshold)

    def disable(self) -> None:
        CACHES[self.case.cache].disable(self.transformer)

    def run(self) -> tuple[torch.Tensor, list[int]]:
        """(the last sample, blocks computed in each pass)."""
        sample, passes = self.inputs["hidden_states"], []
        blocks = getattr(self.transformer, "blocks", None) or self.transformer.transformer_blocks

        def computed(*_: Any) -> None:
            passes[-1] += 1

        handles = [
            (block.ffn if hasattr(block, "ffn") else block.ff).register_forward_hook(computed) for block in blocks
        ]
        takes_moments = (
            "kwargs" in inspect.signature(type(self.transformer).cache_context).parameters
        )  # newer diffusers
        with torch.no_grad():
            for step in range(self.case.steps):
                passes.append(0)
                timestep = 900 - 100 * step
                moment = {"step_index": step, "sigma": timestep / 1000, "num_inference_steps": self.case.steps}
                arguments = self.inputs | {
                    "hidden_states": sample,
                    "timestep": torch.full((self.case.batch,), timestep),
                }
                with self.transformer.cache_context("cond", **(moment if takes_moments else {})):
                    sample = sample - 0.5**step * self.transformer(**arguments)[0]
        for handle in handles:
            handle.remove()
        if self.transformer.is_cache_enabled:
            self.transformer._reset_stateful_cache()
        return sample, passes


def _in_float64(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_in_float64, value))
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class Outcome:
    """difference: of the samples from one process;  effect: of the cache in one process
    expected, ours: blocks computed in each pass, in one process and in parallel
    """

    difference: float
    effect: float
    expected: list[int]
    ours: list[int]


@shared  # on every rank: cache-dit's decisions are collective even in one process's run
def one_process(case: CacheCase) -> tuple[tuple[torch.Tensor, list[int]], list[tuple[torch.Tensor, list[int]]]]:
    """(the last sample, blocks computed in each pass) without a cache, and for each threshold."""
    reference = Denoising(case)
    attach_single_process(reference.transformer, {"mask": MASK})
    uncached, cached = reference.run(), []
    for threshold in case.thresholds:
        reference.enable(threshold)
        cached.append(reference.run())
        reference.disable()
    return uncached, cached


def run_cache_case(rank: int, world: int, case: CacheCase) -> list[Outcome]:
    """By threshold; at last, of a run for which the cache was disabled."""
    if case.left_alone:
        with mock.patch.object(StepCaches, "_cache_dit", return_value=None):
            return run_cache_case(rank, world, replace(case, left_alone=False))
    (uncached, all_computed), references = one_process(case.alone)
    ours = Denoising(case)
    if case.framework == "xdit":
        from tests.xdit.xdit_cases import hosted_transformer

        ours.transformer = hosted_transformer(case.model, num_layers=3).double()
    ours.enable(0.0)
    ours.disable()  # which leaves a trace of its own: each forward as an attribute
    _forget_registries(ours.transformer)
    before = _state_of(ours.transformer)
    attach, detach = _framework(case, ours.transformer, world)
    if not case.first:
        attach()
    outcomes = []
    for threshold, (expected, passes) in zip(case.thresholds, references, strict=True):
        ours.enable(threshold)
        if case.first:
            attach()
        sample, computed = ours.run()
        outcomes.append(Outcome(_apart(sample, expected), _apart(uncached, expected), passes, computed))
        if case.first:
            detach()
        ours.disable()
    if case.first:
        attach()
    sample, computed = ours.run()
    outcomes.append(Outcome(_apart(sample, uncached), 0.0, all_computed, computed))
    detach()
    _forget_registries(ours.transformer)
    after = _state_of(ours.transformer)
    assert after == before, f"left behind: {[a for a in after if a not in before]}"
    return outcomes


def _state_of(transformer: torch.nn.Module) -> list[Any]:
    """In one order: cache-dit, which exchanges the blocks in each pass, puts them back as the last part."""
    return sorted(fingerprint(transformer), key=lambda part: part[0])


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _framework(case: CacheCase, transformer: Any, world: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    config = {"mask": MASK, "strategy": case.strategy}
    if case.framework == "xdit":
        from dbsp_xdit import attach, detach

        pipe = types.SimpleNamespace(transformer=transformer)
        return lambda: attach(pipe, config), lambda: detach(pipe)
    return (
        lambda: dbsp_para.parallelize_transformer(transformer, config=config),
        lambda: dbsp_para.unparallelize(transformer),
    )


def _forget_registries(transformer: torch.nn.Module) -> None:
    """diffusers leaves them when a cache is disabled."""
    for module in transformer.modules():
        vars(module).pop("_diffusers_hook", None)


def cached_before(rank: int, world: int) -> list[float]:
    """Differences from no cache of the first passes after `enable` and `disable`, with a cache that skips all it can.

    What it kept of earlier passes are tensors of other tokens, made with another mask.
    """
    ours, config = Denoising(CacheCase("first block", "wan")), {"mask": MASK}

    def one_pass() -> torch.Tensor:
        with torch.no_grad(), ours.transformer.cache_context("cond"):
            return ours.transformer(**ours.inputs)[0]

    dense = one_pass()
    single = attach_single_process(ours.transformer, config)
    sparse = one_pass()
    single.detach()
    ours.enable(1e9)
    one_pass()
    dbsp_para.parallelize_transformer(ours.transformer, config=config)
    found = [_apart(one_pass(), sparse)]
    dbsp_para.unparallelize(ours.transformer)
    return [*found, _apart(one_pass(), dense)]


def rejection(rank: int, world: int, kind: str) -> tuple[str, str]:
    """What is said of a cache that is there before db-SP, and of one that is enabled after; "" where it is taken."""
    said = []
    for first in (True, False):
        case = UNSUPPORTED[kind]
        ours = Denoising(case)
        attach, detach = _framework(case, ours.transformer, world)
        message = ""
        try:
            if not first:
                attach()
            _enable(kind, ours)
            if first:
                attach()
            ours.run()
        except ValueError as error:
            message = f"{type(error).__name__}: {error}"
        detach()
        said.append(message)
    return said[0], said[1]


def _enable(kind: str, ours: Denoising) -> None:
    from diffusers.hooks import HookRegistry, ModelHook

    if kind == "unknown":
        strange = type("StrangeHook", (ModelHook,), {"new_forward": lambda self, *_, **__: None})
        block = ours.transformer.blocks[1]
        HookRegistry.check_if_exists_or_initialize(block).register_hook(strange(), "strange")
        return
    ours.enable(0.2)
    if kind == "another version":
        del ours.transformer.blocks[0]._diffusers_hook.hooks["fbc_leader_block_hook"].threshold


UNSUPPORTED = {
    "unknown": CacheCase("first block", "wan"),
    "another version": CacheCase("first block", "wan"),
}


def important_tokens(rank: int, world: int) -> str:
    """What is said of cache-dit's decision by single tokens."""
    ours = Denoising(CacheCase("cache-dit", "wan"))
    attach, detach = _framework(ours.case, ours.transformer, world)
    attach()
    ours.enable(0.2)
    for context in ours.transformer._context_manager._cached_context_manager.values():
        context.extra_cache_config.important_condition_threshold = 0.1
    try:
        ours.run()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        detach()
        ours.disable()
    return ""


IN_A_PIPELINE = {"num_inference_steps": 6, "max_sequence_length": 16}


@shared
def pipeline_alone(folder: str, cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What one process makes without the cache, and with it."""
    reference = load("wan", folder).to(torch.float64)
    uncached = alone(reference, {"mask": MASK}, **IN_A_PIPELINE)
    _cache_pipeline(reference, cache)
    return uncached, alone(reference, {"mask": MASK}, **IN_A_PIPELINE)


def run_cached_pipeline(rank: int, world: int, folder: str, cache: str, first: bool) -> tuple[list[float], float]:
    """A whole Wan pipeline in float64, twice, and once more without db-SP. returns: each one's difference from one
    process with the cache, and the cache's effect."""
    uncached, expected = pipeline_alone(folder, cache)
    config, ours = {"mask": MASK}, load("wan", folder).to(torch.float64)
    if first:
        _cache_pipeline(ours, cache)
    dbsp_para.parallelize_pipe(ours, config=config)
    if not first:
        _cache_pipeline(ours, cache)
    made = [latents(ours, **IN_A_PIPELINE), latents(ours, **IN_A_PIPELINE)]
    dbsp_para.unparallelize(ours)
    made.append(alone(ours, config, **IN_A_PIPELINE))
    return [_apart(one, expected) for one in made], _apart(uncached, expected)


def _cache_pipeline(pipe: Any, cache: str) -> None:
    if cache == "first block":
        _first_block(pipe.transformer, 0.3)
        return
    os.environ.setdefault("CACHE_DIT_LOG_LEVEL", "ERROR")
    import cache_dit

    config = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 1, "num_inference_steps": 6}
    cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(**config, residual_diff_threshold=0.3))
