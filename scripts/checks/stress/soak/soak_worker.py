"""Functions of the worker processes: blocks of denoising steps, whole pipelines, and a census after each."""

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
from scripts.checks.stress.soak.frameworks import attach_pipe, attach_transformer, transformer_of
from scripts.checks.stress.soak.soak_draw import SETUPS, Block, Cycle, Setup
from tests.diffusers.cache_cases import CACHES
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.oracle import largest_difference
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import start_xfuser


@dataclass(frozen=True)
class Measured:
    """One rank's numbers after one case. error: of a forward pass from one process, where that was compared
    result: the sum of the last output, which all ranks have identically
    """

    census: Mapping[str, float]
    result: float
    error: float = 0.0


@dataclass
class _Attached:
    """A setup in this process. alone: the same transformer without parallelism, to compare with"""

    setup: Setup
    transformer: Any
    alone: Any
    timestep: int = 0


_attached: dict[int, _Attached] = {}
_leaked: list[Any] = []
_started: list[int] = []


def _start(rank: int, world: int) -> None:
    start_xfuser(rank, world)
    if not _started:
        freeze()
        _started.append(rank)


def run_block(rank: int, world: int, block: Block, leak: bool = False) -> Measured:
    """Runs a block. leak: whether one is planted in it, for a negative control"""
    _start(rank, world)
    one = _attach(block.setup, world)
    with torch.no_grad():
        inputs = [_inputs(one.setup, block, block.seed + index) for index in range(block.passes)]
        error, before = 0.0, torch.empty(0)
        for step in range(block.steps):
            one.timestep = 990 - 39 * step
            for index, arguments in enumerate(inputs):
                arguments["timestep"] = _at(one.timestep, arguments["timestep"])
                with _pass(one, "uncond" if index else "cond", step, block.steps):
                    out = one.transformer(**arguments)[0]
                before = arguments["hidden_states"]
                arguments["hidden_states"] = before - 0.1 * out
        if one.alone is not None and rank == 0:
            error = largest_difference(one.alone(**inputs[-1] | {"hidden_states": before})[0], out)
        if one.setup.cache:
            one.transformer._reset_stateful_cache()
        result = float(out.double().sum())
        del inputs, arguments, out, before
    if leak:
        _plant()
    return Measured(census(), result, error)


def _attach(number: int, world: int) -> _Attached:
    if number not in _attached:
        setup = SETUPS[number]
        transformer, alone = transformer_of(setup.framework, setup.model), None
        if setup.by_input_alone:
            alone = make_tiny_transformer(setup.model)
            attach_single_process(alone, {"mask": setup.config["mask"]})
        one = _attached[number] = _Attached(setup, transformer, alone)
        attach_transformer(setup.framework, transformer, setup.config, world)
        if setup.cache:
            CACHES[setup.cache].enable(transformer, 0.2, lambda: one.timestep)
    return _attached[number]


def _inputs(setup: Setup, block: Block, seed: int) -> dict[str, Any]:
    inputs = tiny_inputs(setup.model, block.thw, block.batch, seed)
    if setup.model == "cogvideox":
        inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"][:, : block.text]
    return inputs


def _at(timestep: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a time step in the units of a model: some count from 0 to 1."""
    return torch.full_like(like, timestep / 1000 if like.is_floating_point() and like.max() <= 1 else timestep)


@contextlib.contextmanager
def _pass(one: _Attached, name: str, step: int, steps: int) -> Iterator[None]:
    if hasattr(one.transformer, "cache_context"):
        position = {"step_index": step, "sigma": one.timestep / 1000, "num_inference_steps": steps}
        with one.transformer.cache_context(name, **(position if one.setup.cache else {})):
            yield
    else:
        yield


def run_cycle(rank: int, world: int, cycle: Cycle, leak: bool = False) -> Measured:
    """Runs a whole pipeline. leak: as above"""
    _start(rank, world)
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        pipe = MAKERS[cycle.model]()
        pipe.set_progress_bar_config(disable=True)
        config = {**cycle.config, **({"report": folder} if cycle.report else {})}
        detach = attach_pipe(cycle.framework, pipe, config, world)
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
    return Measured(census(), result)


def _plant() -> None:
    """Leaks memory, an object of db-SP's, and a file descriptor."""
    _leaked.append((torch.ones(1 << 18), PatchSet(), open(os.devnull, encoding="utf-8")))  # noqa: SIM115
