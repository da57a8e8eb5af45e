"""What the workers run: pipelines and transformers under dbsp_diffusers itself, against one process."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dbsp_diffusers
import dbsp_para
from dbsp_core.comm import groups
from dbsp_core.comm.exchange import Route
from tests.core.comm.device_cases import gpus
from tests.support.models.tiny_pipelines import alone, difference, fingerprint, latents, load, state_of
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.references import by_first_rank
from tests.support.single_process import attach_single_process
from tests.support.user_masks import MOMENTS

CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}


def run_transformer(rank: int, world: int, strategy: str | None) -> tuple[float, float, dict[str, float]]:
    """(difference from one process, from dense attention, statistics), undone without a trace."""
    transformer, inputs = make_transformer("wan"), Inputs.random("wan", (3, 5, 7), 1, 7).arguments
    with torch.no_grad():
        dense = transformer(**inputs)[0]
        single = attach_single_process(transformer, CONFIG)
        expected = transformer(**inputs)[0]
        single.detach()
        before = fingerprint(transformer)
        assert dbsp_diffusers.session_of(transformer) is None
        group = torch.distributed.group.WORLD if world > 1 else None
        session = dbsp_diffusers.enable(transformer, CONFIG, group=group, strategy=strategy)
        assert str(session.strategy) == (strategy or f"U{world}R1")
        out = transformer(**inputs)[0]
        assert dbsp_diffusers.session_of(transformer) is session
        dbsp_diffusers.disable(transformer)
        assert fingerprint(transformer) == before
        assert torch.equal(transformer(**inputs)[0], dense)
        dbsp_diffusers.disable(transformer)
    return difference(out, expected), difference(out, dense), session.statistics()


BRIEF = {"num_inference_steps": 1, "max_sequence_length": 16}


@by_first_rank
def one_process(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents with dense attention, and with CONFIG's."""
    pipe = load("wan", folder)
    return latents(pipe), alone(pipe, CONFIG)


def run_pipeline(rank: int, world: int, folder: str) -> tuple[float, float, float]:
    """(difference from one process, from dense attention, sum of unseeded latents), undone without a trace."""
    dense, expected = one_process(folder)
    pipe = load("wan", folder)
    latents(pipe, **BRIEF)  # a call leaves attributes of its own
    before = state_of(pipe)
    session = dbsp_diffusers.enable(pipe, CONFIG)
    assert dbsp_diffusers.session_of(pipe) is dbsp_diffusers.session_of(pipe.transformer) is session
    out = latents(pipe)
    torch.manual_seed(rank)  # ranks would draw different noise
    unseeded = latents(pipe, seed=None, **BRIEF)
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.session_of(pipe) is None
    assert state_of(pipe) == before
    assert torch.equal(latents(pipe), dense)
    return difference(out, expected), difference(out, dense), float(unseeded.double().sum())


def run_repeated_timesteps(
    rank: int, world: int, folder: str, steps: int
) -> tuple[float, list[tuple[int, int]], list[tuple[int, int]]]:
    """With a scheduler that gives all timesteps but the first twice.

    returns: difference from one process; (step, CFG pass) of each mask that one process asked for, and that this
             rank asked for
    """
    from diffusers import FlowMatchHeunDiscreteScheduler

    pipe: Any = load("wan", folder).to(torch.float64)  # each step multiplies rounding
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    config = {
        "mask": {
            "source": "callable",
            "function": "tests.support.user_masks:band_noting_moments",
            "depends_on": "step",
        }
    }
    config["mask"] |= {"block_q": 8, "block_k": 8}
    options = {"num_inference_steps": steps, "max_sequence_length": 16}
    asked = []
    MOMENTS.clear()
    expected = alone(pipe, config, **options)
    asked.append(list(dict.fromkeys(MOMENTS)))
    MOMENTS.clear()
    dbsp_diffusers.enable(pipe, config)
    out = latents(pipe, **options)
    asked.append(list(dict.fromkeys(MOMENTS)))
    dbsp_diffusers.disable(pipe)
    return difference(out, expected), *asked


def enabled_pipeline(framework: str, folder: str, mask: dict[str, Any]) -> Any:
    """After a call, with db-SP still on it, which holds masks' plans and closures of all kinds."""
    pipe = load("wan", folder)
    if framework == "para":
        dbsp_para.parallelize_pipe(pipe, config={"mask": mask})
    else:
        dbsp_diffusers.enable(pipe, {"mask": mask}, strategy="U1R2")
    return pipe, latents(pipe, seed=None, **BRIEF)


def unsupported() -> Exception:
    """The error of a strategy that does not fit, with its traceback and all that was in scope there."""
    try:
        dbsp_diffusers.enable(make_transformer("wan"), CONFIG, strategy="U7R3")
    except ValueError as error:
        return error
    raise AssertionError("U7R3 was accepted for two ranks")


def enabled_in_a_second_life(rank: int, world: int) -> tuple[str, float]:
    """(what an enabled transformer says once its group is destroyed, difference from one process when enabled anew)"""
    transformer, inputs = make_transformer("wan"), Inputs.random("wan", (3, 5, 7), 1, 7).arguments
    said = ""
    with torch.no_grad():
        single = attach_single_process(transformer, CONFIG)
        expected = transformer(**inputs)[0]
        single.detach()
        group = torch.distributed.new_group(list(range(world)))
        dbsp_diffusers.enable(transformer, CONFIG, group=group)
        transformer(**inputs)
        torch.distributed.destroy_process_group(group)
        del group
        try:
            transformer(**inputs)
        except ValueError as error:
            said = str(error)
        dbsp_diffusers.disable(transformer)
        dbsp_diffusers.enable(transformer, CONFIG)
        out = transformer(**inputs)[0]
        dbsp_diffusers.disable(transformer)
    return said, difference(out, expected)


def exchanges_before_the_first_attention(
    rank: int, world: int, folder: str, settings: dict[str, Any]
) -> list[list[str]]:
    """In what ranks compare anything from `enable` to the first q that is sent, and from the next call to that.

    Broadcasts, by which the first rank passes on its inputs and the state of its random numbers, are noted apart.
    """
    group, pipe, found = dist.new_group(list(range(world)), timeout=timedelta(seconds=77)), load("wan", folder), []
    dispatch = Route.dispatch

    def sent(*arguments: Any) -> Any:
        if found and found[-1][-1] != "q":
            found[-1].append("q")
        return dispatch(*arguments)

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if found and found[-1][-1] != "q":
                found[-1].append(name)
            return function(*args, **options)

        return call

    with ExitStack() as patches:
        for name in ("barrier", "all_reduce", "monitored_barrier", "broadcast", "all_gather", "all_gather_object"):
            patches.enter_context(mock.patch.object(dist, name, noted(name, getattr(dist, name))))
        patches.enter_context(mock.patch.object(groups, "_all_gather_single", noted("gather", None)))
        patches.enter_context(mock.patch.object(Route, "dispatch", sent))
        found.append(["enable"])
        dbsp_diffusers.enable(pipe, settings, group=group)
        latents(pipe, seed=None, **BRIEF)
        found.append(["call"])
        latents(pipe, seed=None, **BRIEF)
    dbsp_diffusers.disable(pipe)
    return found


def current_gpu(rank: int, world: int) -> int:
    """The GPU that is current after `enable`, of four that torch says there are, for a model on the CPU."""
    transformer = make_transformer("wan")
    with gpus(4, {"RANK": str(rank), "LOCAL_RANK": str(rank)}) as seen:
        dbsp_diffusers.enable(transformer, CONFIG)
        dbsp_diffusers.disable(transformer)
    return seen[-1]
