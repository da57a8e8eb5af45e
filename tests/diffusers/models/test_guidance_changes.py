"""Guidance on two halves while things change: between the passes, between the steps, and where a half fails."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import dbsp_diffusers
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.guidance import GuidedCalls
from dbsp_diffusers.sharding.halves import Halves
from tests.diffusers.models.test_guidance import STEPS, Guided, in_one_process
from tests.support.models.tiny_pipelines import attach_pipeline
from tests.support.models.tiny_transformers import _DRAWING, make_tiny_transformer, tiny_inputs
from tests.support.outcomes import assert_near, said
from tests.support.shared import shared

DENSE = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}
TIMES = (900.0, 600.0, 300.0)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# What a caller changes between the two passes.


def _scale_latents(transformer: Any, inputs: dict[str, Any]) -> None:
    inputs["hidden_states"].mul_(0.5)


def _rewrite_text(transformer: Any, inputs: dict[str, Any]) -> None:
    inputs["encoder_hidden_states"].neg_()


def _switch_adapter_off(transformer: Any, inputs: dict[str, Any]) -> None:
    transformer.disable_adapters()


def _change_weights(transformer: Any, inputs: dict[str, Any]) -> None:
    transformer.proj_out.weight.data.mul_(2)


CHANGES: dict[str, Callable[[Any, dict[str, Any]], None]] = {
    "latents in place": _scale_latents,
    "text in place": _rewrite_text,
    "adapter off": _switch_adapter_off,
    "weights": _change_weights,
}


@torch.no_grad()
def loop(transformer: Any, change: str, read: Callable[[torch.Tensor], torch.Tensor] = lambda out: out) -> list[Any]:
    """Returns the outputs of a loop of a user's own, which changes something between the passes of each step."""
    made = []
    for step, time in enumerate(TIMES):
        inputs = tiny_inputs("wan") | {"timestep": torch.tensor([time])}
        inputs["hidden_states"] = inputs["hidden_states"] + 0.1 * step
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].clone()
        with transformer.cache_context("cond"):
            wanted = read(transformer(**inputs)[0])
        CHANGES[change](transformer, inputs)
        with transformer.cache_context("uncond"):
            unwanted = transformer(**inputs)[0]
        made.append(unwanted + 2 * (wanted - unwanted))
        if change == "adapter off":
            transformer.enable_adapters()
    return made


@torch.no_grad()
def with_adapter() -> Any:
    from peft import LoraConfig

    transformer = make_tiny_transformer("wan", num_layers=1)
    with _DRAWING:
        transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    for number, (name, weight) in enumerate(sorted(transformer.named_parameters())):
        if "lora_" in name:
            weight.copy_(drawn(number, *weight.shape))
    return transformer


def changed_between_passes(rank: int, world: int, change: str) -> None:
    expected = loop(with_adapter(), change)
    transformer = with_adapter()
    session = dbsp_diffusers.enable(transformer, DENSE, guidance=True)
    assert_near(loop(transformer, change), expected)
    assert session.statistics()["calls"] == len(TIMES), "each half computes one pass of a step"


@pytest.mark.parametrize("change", CHANGES)
def test_each_pass_sees_what_it_was_called_with(threads, change):
    threads(2).run(changed_between_passes, change)


# Guidance that ends and returns within a generation.


def _cached(name: str) -> Guided:
    return Guided(cache=0.0) if name == "none" else Guided(cache=10.0 if name == "first block" else 1e-9)


def dynamic(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
    """A callback that ends guidance after the first step, and lets it return after the third."""
    pipe._guidance_scale = 1.0 if step < 2 else 5.0
    return kept


@shared
def dynamic_in_one_process(cache: str) -> torch.Tensor:
    guided = _cached(cache)
    pipe = guided.pipe()
    attach_pipeline(pipe, guided.config)
    return guided.made(pipe, num_inference_steps=5, callback_on_step_end=dynamic)


def guidance_that_changes(rank: int, world: int, cache: str) -> None:
    guided, expected = _cached(cache), dynamic_in_one_process(cache)
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    for _ in range(2):
        assert_near(guided.made(pipe, num_inference_steps=5, callback_on_step_end=dynamic), expected)


@pytest.mark.parametrize("cache", ["none", "first block", "first block that never skips"])
def test_guidance_that_ends_and_returns_equals_one_process(threads, cache):
    threads(2).run(guidance_that_changes, cache)


def not_announced(rank: int, world: int) -> None:
    guided, (_, expected) = Guided(), in_one_process(Guided())
    pipe = guided.pipe()
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    assert_near(guided.made(pipe), expected)
    assert session.statistics()["calls"] == (STEPS + 1) * session.layers


def test_guidance_that_is_not_announced_is_shared_from_the_second_step(threads):
    with mock.patch.object(Generations, "has_second_pass", return_value=None):
        threads(2).run(not_announced)


# What halves cannot share is said on all ranks.


def early_reader(rank: int, world: int, steps: int) -> str:
    """Returns what a call says whose pipeline copies the first pass's output in one step. The next must be right."""
    guided = Guided()
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    answer = said(lambda: guided.made(pipe, num_inference_steps=steps))
    assert_near(guided.made(pipe), in_one_process(guided)[1])
    return answer


@pytest.mark.parametrize(("steps", "step"), [(1, 0), (2, 1), (3, 0)])
def test_output_that_is_read_before_the_second_pass_is_an_error_on_all_ranks(threads, steps, step):
    first, passes = GuidedCalls._first_pass, Counter[int]()

    def copied(calls: GuidedCalls, *args: Any) -> torch.Tensor:
        rank = calls.halves.ranks.rank
        passes[rank] += 1
        output = first(calls, *args)
        return output.clone() if passes[rank] == step + 1 else output

    with mock.patch.object(GuidedCalls, "_first_pass", copied):
        answers = threads(2).run(early_reader, steps)
    for answer in answers:
        assert answer.startswith("UserError: the latents became NaN on rank(s) [")
        assert "copied before the second one" in answer


def without_second(rank: int, world: int, in_call: bool) -> str:
    """Returns what is said of a pass that no second one follows: in the next pass, or at the end of the call."""
    guided = Guided()
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    inputs = tiny_inputs("wan")

    def passes() -> None:
        for time in (900.0, 500.0):
            with torch.no_grad(), pipe.transformer.cache_context("cond"):
                pipe.transformer(**inputs | {"timestep": torch.tensor([time])})

    def call() -> None:
        guided.made(pipe, guidance_scale=1.0, num_inference_steps=1)

    answer = said(call if in_call else passes)
    assert_near(guided.made(pipe), in_one_process(guided)[1])
    return answer


@pytest.mark.parametrize("in_call", [True, False])
def test_pass_without_the_second_one_that_was_announced_is_an_error_on_all_ranks(threads, in_call):
    with mock.patch.object(Generations, "has_second_pass", return_value=True):
        answers = threads(2).run(without_second, in_call)
    for answer in answers:
        assert "a pass in cache context 'cond' was not followed by one in 'uncond' of the same step" in answer


def failing_half(rank: int, world: int, half: int, step: int, error: type[Exception]) -> str:
    """Returns what a call says in which one half fails in some step. The next call must be right."""
    guided, (_, expected) = Guided(), in_one_process(Guided())
    pipe = guided.pipe()
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    attend, calls = session.attend, Counter[str]()

    def fail(*args: Any, **options: Any) -> torch.Tensor:
        calls["attend"] += 1
        if rank // (world // 2) == half and calls["attend"] > step * session.layers:
            raise error("out of memory")
        return attend(*args, **options)

    with mock.patch.object(session, "attend", fail):
        answer = said(lambda: guided.made(pipe))
    assert_near(guided.made(pipe), expected)
    return answer


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, ValueError])
def test_error_in_one_half_ends_both_in_every_step(threads, half, step, error):
    for rank, answer in enumerate(threads(4).run(failing_half, half, step, error)):
        assert "out of memory" in answer
        if rank // 2 == half:
            assert answer.startswith(error.__name__), "the rank's own error keeps its type"
        else:
            assert f"rank(s) {[2 * half, 2 * half + 1]}" in answer


# What a steady step exchanges.


def last_step(rank: int, world: int, sent: list[tuple[int, str]]) -> list[str]:
    """Returns this rank's broadcasts and exchanges of bytes in the last of three steps, from `sent` by thread."""
    guided = Guided(mask="dense")
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)

    def mark(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        sent.append((threading.get_ident(), f"end of step {step}"))
        return kept

    guided.made(pipe, callback_on_step_end=mark)
    mine = [what for thread, what in sent if thread == threading.get_ident()]
    return mine[mine.index("end of step 1") + 1 : mine.index("end of step 2")]


def test_steady_step_broadcasts_within_a_half_and_exchanges_once(threads):
    sent: list[tuple[int, str]] = []
    broadcast, exchange = GenerationChecks.first_rank_values, Halves.exchange

    def noted_broadcast(checks: GenerationChecks, tensors: Any) -> Any:
        sent.append((threading.get_ident(), f"broadcast among {checks.group.size}"))
        return broadcast(checks, tensors)

    def noted_exchange(halves: Halves, mine: torch.Tensor) -> Any:
        sent.append((threading.get_ident(), "exchange"))
        return exchange(halves, mine)

    with (
        mock.patch.object(GenerationChecks, "first_rank_values", noted_broadcast),
        mock.patch.object(Halves, "exchange", noted_exchange),
    ):
        for step in threads(4).run(last_step, sent):
            assert step == ["broadcast among 2", "exchange"]
