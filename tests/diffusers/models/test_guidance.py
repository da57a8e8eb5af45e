"""Guidance parallelism: two halves of the ranks compute a step's two CFG passes, as one process does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

import dbsp_diffusers
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.guidance import GuidedCalls, Halves
from tests.diffusers.models.pipeline_cases import CASES, Case, make_pipe
from tests.support.models.tiny_pipelines import attach_pipeline, fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart, assert_near, said
from tests.support.shared import shared

MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense", "block_q": 16, "block_k": 16},
    "synthetic": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8},
    "sparge": {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 4, "block_k": 4, "dense_text": False},
}
STEPS = 3


@dataclass(frozen=True)
class Guided:
    """A pipeline of `CASES`, by name, and its call.

    Attributes:
        two: Whether a second transformer takes the late steps (Wan2.2).
        cache: Threshold of a first-block cache, or None.
        call: Arguments that are not the case's own, as pairs.
    """

    pipeline: str = "WanPipeline"
    mask: str = "synthetic"
    strategy: str | None = None
    two: bool = False
    cache: float | None = None
    call: tuple[tuple[str, Any], ...] = field(default=())

    @property
    def case(self) -> Case:
        return next(case for case in CASES if case.pipeline == self.pipeline)

    @property
    def config(self) -> dict[str, Any]:
        return {"mask": MASKS[self.mask], "strategy": self.strategy, "dense_schedule": {"first_steps": 1}}

    def pipe(self) -> Any:
        pipe = make_pipe(self.case, torch.float32, **({} if self.cache is None else {"num_layers": 2}))
        if self.two:
            second = make_tiny_transformer("wan", seed=7, num_layers=1)
            pipe.register_modules(transformer_2=second)
            pipe.register_to_config(boundary_ratio=0.95)  # the first of three steps is before it
        if self.cache is not None:
            from diffusers.hooks import FirstBlockCacheConfig

            pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=self.cache))
        return pipe

    def made(self, pipe: Any, **more: Any) -> torch.Tensor:
        options = _arguments(self) | {"generator": torch.Generator().manual_seed(3), "num_inference_steps": STEPS}
        return pipe(output_type="latent", return_dict=False, **options | dict(self.call) | more)[0]


@shared
def _arguments(guided: Guided) -> dict[str, Any]:
    """Returns the arguments of the case's call, with another negative prompt than prompt."""
    torch.manual_seed(1)
    arguments = guided.case.arguments(torch.float32)
    turned = {name for name, one in arguments.items() if name.startswith("negative_prompt_embeds") and one.ndim == 3}
    return arguments | {name: -arguments[name] for name in turned if arguments[name].is_floating_point()}


@shared
def in_one_process(guided: Guided) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents of dense attention, and of the configuration's masks."""
    pipe = guided.pipe()
    dense = guided.made(pipe)
    attach_pipeline(pipe, guided.config)
    return dense, guided.made(pipe)


def run_guided(rank: int, world: int, guided: Guided, passes: float = 1, wrong: bool = False) -> None:
    """Makes two calls of a pipeline in two halves, and one after `disable`.

    passes: how many a half computes in a step;  wrong: whether the outputs must be others, for a negative control
    """
    dense, expected = in_one_process(guided)
    pipe = guided.pipe()
    guided.made(pipe, num_inference_steps=1)  # which leaves attributes of its own
    before = [fingerprint(one) for one in transformers_of(pipe).values()]
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    made = [guided.made(pipe) for _ in range(2)]
    sessions = dbsp_diffusers.sessions_of(pipe).values()
    calls = sum(one.statistics()["calls"] for one in sessions) / (len(made) * STEPS * session.layers)
    dbsp_diffusers.disable(pipe)
    assert before == [fingerprint(one) for one in transformers_of(pipe).values()], "disable left something behind"
    if guided.cache is None:
        assert apart(guided.made(pipe), dense) == 0
    assert session.group.size == world // 2
    assert calls == pytest.approx(passes)
    for one in made:
        if wrong:
            assert apart(one, expected) > 1e-3
        else:
            assert_near(one, expected, dense if guided.cache is None else None)


MILD = (("guidance_scale", 2.0),)
"""Guidance multiplies rounding by its scale."""
GUIDED = {
    "predicted masks": (4, Guided(mask="sparge", strategy="U1R2")),
    "two transformers": (4, Guided(mask="sparge", two=True)),
    "sliced outputs": (2, Guided("QwenImagePipeline", "sparge")),
    "guider": (4, Guided("HunyuanVideo15Pipeline")),
    "one batch": (4, Guided("CogVideoXPipeline", "sparge", "U1R2", call=MILD)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name == "guider" else ()) for name in GUIDED]
)
def test_halves_equal_one_process(threads, name):
    world, guided = GUIDED[name]
    threads(world).run(run_guided, guided)


def test_first_block_cache_skips_what_one_process_skips(threads):
    """Computes two layers in the first step, and one in each step after it."""
    threads(4).run(run_guided, Guided(cache=10.0, strategy="U1R2"), (1 + 1 / 2 + 1 / 2) / 3)


def test_pass_without_a_second_one_is_right_and_logged(threads, caplog):
    caplog.set_level("WARNING", "dbsp")
    threads(4).run(run_guided, Guided("QwenImagePipeline", "sparge", call=(("true_cfg_scale", 1.0),)))
    assert [one.getMessage() for one in caplog.records if "without a second one" in one.getMessage()]


def test_outputs_of_one_half_alone_are_another_video(threads):
    """Shows as a negative control that without the exchange both passes of guidance are one."""
    with mock.patch.object(Halves, "exchange", lambda halves, mine: (mine, mine)):
        threads(2).run(run_guided, Guided(), 1, True)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "odd": ({"guidance": True}, "guidance=True needs an even number of ranks, got 3"),
    "class": ({"guidance": True}, "the two CFG passes of LTXVideoTransformer3DModel"),
    "mesh": ({"guidance": True, "mesh": object()}, "which mesh does not support"),
    "auto": ({"guidance": "auto"}, "guidance must be True or False, got 'auto'"),
    "on one rank": ({"guidance": True}, "differ"),
}
"""Arguments of `enable`, on the last rank, and what it says."""


def rejected_by_enable(rank: int, world: int, name: str) -> None:
    pipe = Guided("LTXPipeline" if name == "class" else "WanPipeline").pipe()
    before, (options, part) = fingerprint(pipe.transformer), REJECTED[name]
    if rank != world - 1 and name == "on one rank":
        options = {"guidance": False}
    assert part in said(lambda: dbsp_diffusers.enable(pipe, {"mask": MASKS["dense"]}, **options))
    assert fingerprint(pipe.transformer) == before


@pytest.mark.parametrize("name", REJECTED)
def test_enable_rejects_on_all_ranks(threads, name):
    threads(3 if name == "odd" else 2).run(rejected_by_enable, name)


def rejected_in_a_pass(rank: int, world: int, name: str) -> str:
    """Returns what a call says that two halves cannot share."""
    guided = Guided("CogVideoXPipeline" if name == "cache" else "WanPipeline", cache=1.0 if name == "cache" else None)
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    if name == "gradients":
        return said(lambda: pipe.transformer(**tiny_inputs("wan")))
    return said(lambda: guided.made(pipe))


@pytest.mark.parametrize(("name", "part"), [("gradients", "torch.no_grad()"), ("cache", "FBC")])
def test_passes_that_halves_cannot_share_are_rejected(threads, name, part):
    for answer in threads(2).run(rejected_in_a_pass, name):
        assert part in answer


def test_halves_on_processes(pool):
    pool(4).run(run_guided, Guided(strategy="U1R2"))


def dynamic(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
    """A callback that ends guidance after the first step, and lets it return after the third."""
    pipe._guidance_scale = 1.0 if step < 2 else 5.0
    return kept


@shared
def dynamic_in_one_process(guided: Guided) -> torch.Tensor:
    pipe = guided.pipe()
    attach_pipeline(pipe, guided.config)
    return guided.made(pipe, num_inference_steps=5, callback_on_step_end=dynamic)


def guidance_that_changes(rank: int, world: int, guided: Guided) -> None:
    expected, pipe = dynamic_in_one_process(guided), guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    for _ in range(2):
        assert_near(guided.made(pipe, num_inference_steps=5, callback_on_step_end=dynamic), expected)


def test_guidance_that_ends_and_returns_equals_one_process(threads):
    """Runs with a first-block cache that skips."""
    threads(2).run(guidance_that_changes, Guided(cache=10.0))


def rejected(call: Callable[[Any, Any], object]) -> str:
    """Returns what a call of an enabled pipeline, and its session, says. The next call must be right."""
    guided, (_, expected) = Guided(), in_one_process(Guided())
    pipe = guided.pipe()
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    answer = said(lambda: call(pipe, session))
    assert_near(guided.made(pipe), expected)
    return answer


def early_reader(rank: int, world: int) -> str:
    return rejected(lambda pipe, _: Guided().made(pipe, num_inference_steps=2))


def test_output_that_is_read_before_the_second_pass_is_an_error_on_all_ranks(threads):
    """Copies the first pass's output in the second step."""
    first, passes = GuidedCalls._first_pass, Counter[int]()

    def copied(calls: GuidedCalls, *args: Any) -> torch.Tensor:
        rank = calls.halves.ranks.rank
        passes[rank] += 1
        output = first(calls, *args)
        return output.clone() if passes[rank] == 2 else output

    with mock.patch.object(GuidedCalls, "_first_pass", copied):
        for answer in threads(2).run(early_reader):
            assert answer.startswith("UserError: the latents became NaN on rank(s) [")
            assert "copied before the second pass" in answer


def without_second(rank: int, world: int, in_call: bool) -> str:
    """Returns what is said of a pass that no second one follows: at the end of the call, or in the next pass."""

    def call(pipe: Any, session: Any) -> None:
        if in_call:
            Guided().made(pipe, guidance_scale=1.0, num_inference_steps=1)
        for time in (900.0, 500.0):
            with torch.no_grad(), pipe.transformer.cache_context("cond"):
                pipe.transformer(**tiny_inputs("wan") | {"timestep": torch.tensor([time])})

    return rejected(call)


@pytest.mark.parametrize("in_call", [True, False])
def test_pass_without_the_second_one_that_was_announced_is_an_error_on_all_ranks(threads, in_call):
    with mock.patch.object(Generations, "has_second_pass", return_value=True):
        for answer in threads(2).run(without_second, in_call):
            assert "a pass in cache context 'cond' was not followed by one in 'uncond' of the same step" in answer


def failing_half(rank: int, world: int, half: int) -> str:
    """Returns what a call says in which one half fails in the third step."""

    def call(pipe: Any, session: Any) -> None:
        attend, calls = session.attend, Counter[str]()

        def fail(*args: Any, **options: Any) -> torch.Tensor:
            calls["attend"] += 1
            if rank // (world // 2) == half and calls["attend"] > 2 * session.layers:
                raise torch.OutOfMemoryError("out of memory")
            return attend(*args, **options)

        with mock.patch.object(session, "attend", fail):
            Guided().made(pipe)

    return rejected(call)


@pytest.mark.parametrize("half", [0, 1])
def test_error_in_one_half_ends_both(threads, half):
    for rank, answer in enumerate(threads(4).run(failing_half, half)):
        assert "out of memory" in answer
        if rank // 2 == half:
            assert answer.startswith("OutOfMemoryError"), "the rank's own error keeps its type"
        else:
            assert f"rank(s) {[2 * half, 2 * half + 1]}" in answer
