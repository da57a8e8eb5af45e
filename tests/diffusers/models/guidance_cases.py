"""What ranks run: pipelines whose two CFG passes are computed by two halves of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import StepClock
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.sharding.generations import Generations
from tests.diffusers.models.pipeline_cases import CASES, Case, make_pipe
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

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
        found: torch.Tensor = pipe(output_type="latent", return_dict=False, **options | dict(self.call) | more)[0]
        return found


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
    transformers, generations = transformers_of(pipe), Generations(pipe, SequenceGroup(0, 1))
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    for transformer in transformers.values():
        attach_single_process(transformer, guided.config, generations.steps, clock)
    return dense, guided.made(pipe)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@dataclass(frozen=True)
class Found:
    """What a rank found. `errors` are from one process, `effect` the mask's, `left` after disable.

    Attributes:
        calls: Attentions that this rank's sessions counted for each step and layer.
    """

    errors: tuple[float, ...]
    effect: float
    left: float
    restored: bool
    group: int
    calls: float


def run_guided(rank: int, world: int, guided: Guided) -> Found:
    """Two calls of a pipeline in two halves, and one after `disable`."""
    dense, expected = in_one_process(guided)
    pipe = guided.pipe()
    guided.made(pipe, num_inference_steps=1)  # which leaves attributes of its own
    before = [fingerprint(one) for one in transformers_of(pipe).values()]
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    made = [guided.made(pipe) for _ in range(2)]
    sessions = dbsp_diffusers.sessions_of(pipe).values()
    calls = sum(one.statistics()["calls"] for one in sessions) / (len(made) * STEPS * session.layers)
    dbsp_diffusers.disable(pipe)
    restored = before == [fingerprint(one) for one in transformers_of(pipe).values()]
    left = apart(guided.made(pipe), dense) if guided.cache is None else 0.0
    errors = tuple(apart(one, expected) for one in made)
    return Found(errors, apart(dense, expected), left, restored, session.group.size, calls)


def said(action: Callable[[], Any]) -> str:
    """Returns what an action raised, or "nothing"."""
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


def rejected_by_enable(rank: int, world: int, name: str) -> str:
    """Returns what `enable` says, after which nothing may be left behind."""
    pipe = Guided("HunyuanVideo15Pipeline" if name == "class" else "WanPipeline").pipe()
    before = fingerprint(pipe.transformer)
    odd = rank == world - 1
    options: dict[str, Any] = {
        "odd": {"guidance": True},
        "class": {"guidance": True},
        "value": {"guidance": "both"},
        "mesh": {"guidance": True, "mesh": object()},
        "auto": {"guidance": "auto", "strategy": "U2R1"},
        "on one rank": {"guidance": odd},
        "another kind on one rank": {"guidance": "auto" if odd else True},
    }[name]
    answer = said(lambda: dbsp_diffusers.enable(pipe, {"mask": MASKS["dense"]}, **options))
    assert fingerprint(pipe.transformer) == before
    return answer


def rejected_in_a_pass(rank: int, world: int, name: str) -> str:
    """Returns what a call says that two halves cannot share."""
    guided = Guided("CogVideoXPipeline" if name == "cache" else "WanPipeline", cache=1.0 if name == "cache" else None)
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    if name == "gradients":
        return said(lambda: pipe.transformer(**tiny_inputs("wan")))
    return said(lambda: guided.made(pipe))


def failing_in_one_half(rank: int, world: int) -> tuple[str, float]:
    """Returns what a call says whose mask fails in the second half, and how far the next call is off."""
    guided = Guided()
    _, expected = in_one_process(guided)
    pipe = guided.pipe()
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    with (
        mock.patch.object(session, "attend", side_effect=UserError("no mask")) if rank >= world // 2 else nullcontext()
    ):
        answer = said(lambda: guided.made(pipe))
    return answer, apart(guided.made(pipe), expected)


def chosen_automatically(rank: int, world: int, config: dict[str, Any]) -> int:
    """Returns the size of the group that shares a sequence."""
    pipe = Guided().pipe()
    session = dbsp_diffusers.enable(pipe, {"mask": MASKS["dense"]} | config, guidance="auto")
    return session.group.size


def failing_on_processes(rank: int, world: int) -> tuple[Found, tuple[str, float]]:
    """Returns what runs of real process groups found."""
    return run_guided(rank, world, Guided(strategy="U1R2")), failing_in_one_half(rank, world)
