"""What the worker processes run: blocks of denoising steps, cycles of whole pipelines, and a census after each."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_cli.tiny_models import MAKERS
from dbsp_diffusers.patching import PatchSet
from scripts.checks.stress.soak.census import census, freeze
from scripts.checks.stress.soak.hosts import attach_pipe, attach_transformer, transformer_of
from scripts.checks.stress.soak.soak_draw import STANDS, Block, Cycle, Stand
from tests.diffusers.cache_cases import CACHES
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.oracle import largest_difference
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import start_xfuser


@dataclass(frozen=True)
class Told:
    """By one rank of one case. error: of a forward pass from one process, where that was compared
    result: the sum of the last output, which all ranks have identically
    """

    census: Mapping[str, float]
    result: float
    error: float = 0.0


@dataclass
class _Standing:
    """A stand in this process. alone: the same transformer without parallelism, to compare with"""

    stand: Stand
    transformer: Any
    alone: Any
    timestep: int = 0


_standing: dict[int, _Standing] = {}
_leaked: list[Any] = []
_started: list[int] = []


def _start(rank: int, world: int) -> None:
    start_xfuser(rank, world)
    if not _started:
        freeze()
        _started.append(rank)


def run_block(rank: int, world: int, block: Block, leak: bool = False) -> Told:
    """leak: whether one is planted in it, for a negative control"""
    _start(rank, world)
    one = _stand(block.stand, world)
    with torch.no_grad():
        inputs = [_inputs(one.stand, block, block.seed + place) for place in range(block.passes)]
        error, before = 0.0, torch.empty(0)
        for step in range(block.steps):
            one.timestep = 990 - 39 * step
            for place, arguments in enumerate(inputs):
                arguments["timestep"] = _at(one.timestep, arguments["timestep"])
                with _pass(one, "uncond" if place else "cond", step, block.steps):
                    out = one.transformer(**arguments)[0]
                before = arguments["hidden_states"]
                arguments["hidden_states"] = before - 0.1 * out
        if one.alone is not None and rank == 0:
            error = largest_difference(one.alone(**inputs[-1] | {"hidden_states": before})[0], out)
        if one.stand.cache:
            one.transformer._reset_stateful_cache()
        result = float(out.double().sum())
        del inputs, arguments, out, before
    if leak:
        _plant()
    return Told(census(), result, error)


def _stand(number: int, world: int) -> _Standing:
    if number not in _standing:
        stand = STANDS[number]
        transformer, alone = transformer_of(stand.host, stand.model), None
        if stand.by_input_alone:
            alone = make_tiny_transformer(stand.model)
            attach_single_process(alone, {"mask": stand.config["mask"]})
        one = _standing[number] = _Standing(stand, transformer, alone)
        attach_transformer(stand.host, transformer, stand.config, world)
        if stand.cache:
            CACHES[stand.cache].enable(transformer, 0.2, lambda: one.timestep)
    return _standing[number]


def _inputs(stand: Stand, block: Block, seed: int) -> dict[str, Any]:
    inputs = tiny_inputs(stand.model, block.thw, block.batch, seed)
    if stand.model == "cogvideox":
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, : block.text]
    return inputs


def _at(timestep: int, like: torch.Tensor) -> torch.Tensor:
    """Some models count from 0 to 1."""
    return torch.full_like(like, timestep / 1000 if like.is_floating_point() and like.max() <= 1 else timestep)


@contextlib.contextmanager
def _pass(one: _Standing, name: str, step: int, steps: int) -> Iterator[None]:
    if hasattr(one.transformer, "cache_context"):
        place = {"step_index": step, "sigma": one.timestep / 1000, "num_inference_steps": steps}
        with one.transformer.cache_context(name, **(place if one.stand.cache else {})):
            yield
    else:
        yield


def run_cycle(rank: int, world: int, cycle: Cycle, leak: bool = False) -> Told:
    """leak: as above"""
    _start(rank, world)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        pipe = MAKERS[cycle.model]()
        pipe.set_progress_bar_config(disable=True)
        config = {**cycle.config, **({"report": folder} if cycle.report else {})}
        detach = attach_pipe(cycle.host, pipe, config, world)
        out = pipe(
            "the sea at dusk",
            output_type="latent",
            guidance_scale=2.0,
            generator=torch.Generator().manual_seed(3),
            **cycle.size,
        ).frames
        detach()
        if cycle.report and rank == 0 and not os.listdir(folder):
            raise AssertionError("no report was written")
        result = float(out.double().sum())
        del pipe, detach, out
    if leak:
        _plant()
    return Told(census(), result)


def _plant() -> None:
    """Memory, an object of db-SP's, and a file descriptor."""
    _leaked.append((torch.ones(1 << 18), PatchSet(), open(os.devnull, encoding="utf-8")))  # noqa: SIM115
