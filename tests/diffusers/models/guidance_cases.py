"""What ranks run: pipelines whose two guidance passes are computed by two halves of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import StepClock
from dbsp_diffusers.attached import transformers_of
from dbsp_diffusers.sharding.generations import Generations
from tests.diffusers.models.pipeline_cases import CASES, Case, make_pipe
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense", "block_q": 16, "block_k": 16},
    "synthetic": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8},
    "sparge": {
        **{"source": "sparge", "cdf": 0.5, "similarity": 0.1},
        **{"block_q": 4, "block_k": 4, "dense_text": False},
    },
}


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
        pipe = make_pipe(self.case, torch.float32)
        if self.two:
            second = make_tiny_transformer("wan", seed=7, num_layers=1)
            pipe.register_modules(transformer_2=second)
            pipe.register_to_config(boundary_ratio=0.7)
        if self.cache is not None:
            from diffusers.hooks import FirstBlockCacheConfig

            pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=self.cache))
        return pipe

    def made(self, pipe: Any, **more: Any) -> torch.Tensor:
        options = _arguments(self) | {"generator": torch.Generator().manual_seed(3), "num_inference_steps": 3}
        found: torch.Tensor = pipe(output_type="latent", return_dict=False, **options | dict(self.call) | more)[0]
        return found


@shared
def _arguments(guided: Guided) -> dict[str, Any]:
    torch.manual_seed(1)
    return guided.case.arguments(torch.float32)


@shared
def in_one_process(guided: Guided) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents of dense attention, and of the configuration's masks."""
    torch.manual_seed(0)
    pipe = guided.pipe()
    dense = guided.made(pipe)
    transformers, generations = transformers_of(pipe), Generations(pipe, SequenceGroup(0, 1))
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    for transformer in transformers.values():
        attach_single_process(transformer, guided.config, generations.steps, clock)
    return dense, guided.made(pipe)


def enabled(guided: Guided, **options: Any) -> Any:
    """Returns the pipeline with db-SP on it."""
    torch.manual_seed(0)
    pipe = guided.pipe()
    dbsp_diffusers.enable(pipe, guided.config, **{"guidance": True} | options)
    return pipe


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@dataclass(frozen=True)
class Found:
    """What a rank found. `errors` are from one process, `effect` the mask's, `left` after disable.

    Attributes:
        calls: Attentions that this rank's session of each transformer counted.
    """

    errors: tuple[float, ...]
    effect: float
    left: float
    restored: bool
    group: int
    calls: tuple[float, ...]


def run_guided(rank: int, world: int, guided: Guided) -> Found:
    """Two calls of a pipeline in two halves, and one after `disable`."""
    dense, expected = in_one_process(guided)
    torch.manual_seed(0)
    pipe = guided.pipe()
    before = [fingerprint(one) for one in transformers_of(pipe).values()]
    session = dbsp_diffusers.enable(pipe, guided.config, guidance=True)
    made = [guided.made(pipe) for _ in range(2)]
    calls = tuple(one.statistics()["calls"] for one in dbsp_diffusers.sessions_of(pipe).values())
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
