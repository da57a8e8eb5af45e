"""dbsp_diffusers by itself: enabled, undone without a trace, and what sessions report."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_core.comm.exchange import Route
from dbsp_core.comm.groups import CommunicationError
from tests.core.comm.lifetimes import left_alive
from tests.support.models import tiny_pipelines
from tests.support.models.tiny_pipelines import fingerprint, latents, load, state_of
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs, said
from tests.support.references import by_first_rank
from tests.support.steady_cases import collectives

CONFIG = {"mask": {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}}
BRIEF = {"num_inference_steps": 1, "max_sequence_length": 16}


@torch.no_grad()
def test_transformer_in_one_process_without_ranks():
    transformer, inputs = make_tiny_transformer("wan"), tiny_inputs("wan")
    dense, expected = outputs(transformer, inputs), alone(transformer, inputs, CONFIG)
    before = fingerprint(transformer)
    assert dbsp_diffusers.session_of(transformer) is None
    session = dbsp_diffusers.enable(transformer, CONFIG)
    assert str(session.strategy) == "U1R1"
    assert session.statistics() == {"calls": 0, "plans": 0, "mean_rho": 1.0, "worst_rho": 1.0}
    assert_near(outputs(transformer, inputs), expected, dense)
    assert dbsp_diffusers.session_of(transformer) is session
    for _ in range(2):  # the second time there is nothing to do
        dbsp_diffusers.disable(transformer)
    assert fingerprint(transformer) == before
    assert apart(outputs(transformer, inputs), dense) == 0
    statistics = session.statistics()
    assert (statistics["calls"], statistics["plans"]) == (2, 2)
    assert 1.0 <= statistics["mean_rho"] <= statistics["worst_rho"] < 2.0


@by_first_rank
def one_process(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents with dense attention, and with CONFIG's."""
    pipe = load("wan", folder)
    return latents(pipe), tiny_pipelines.alone(pipe, CONFIG)


def run_pipeline(rank: int, world: int, folder: str) -> float:
    """Returns the sum of latents without a seed."""
    dense, expected = one_process(folder)
    pipe = load("wan", folder)
    latents(pipe, **BRIEF)  # a call leaves attributes of its own
    before = state_of(pipe)
    session = dbsp_diffusers.enable(pipe, CONFIG)
    assert dbsp_diffusers.session_of(pipe) is dbsp_diffusers.session_of(pipe.transformer) is session
    assert_near(latents(pipe), expected, dense)
    torch.manual_seed(rank)  # ranks would draw different noise
    unseeded = latents(pipe, seed=None, **BRIEF)
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.session_of(pipe) is None
    assert state_of(pipe) == before
    assert torch.equal(latents(pipe), dense)
    return float(unseeded.double().sum())


def test_pipeline_equals_one_process(pool, folder):
    assert len(set(pool(2).run(run_pipeline, folder))) == 1, "ranks must share their noise"


def compared_before_attention(rank: int, world: int, folder: str) -> dict[str, int]:
    """Returns what ranks send from `enable` to the first q, by name."""
    group, pipe = dist.new_group(list(range(world))), load("wan", folder)
    sent = mock.patch.object(Route, "start", side_effect=CommunicationError("far enough"))
    with collectives() as seen, sent:
        dbsp_diffusers.enable(pipe, CONFIG, group=group)
        assert said(lambda: latents(pipe, seed=None, **BRIEF)) == "CommunicationError: far enough"
    dbsp_diffusers.disable(pipe)
    return dict(seen)


def test_ranks_compare_four_times_from_enable_to_the_first_attention(pool, folder):
    """Expects comparisons when db-SP is enabled, at the call, before the pass and at the attention."""
    for seen in pool(2).run(compared_before_attention, folder):  # headers, random numbers, inputs
        assert seen == {"all_gather": 4, "broadcast": 4}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"mask": {"source": "window", "window": [99, 99, 99]}}, "mask window skipped no blocks (density 1.000)"),
        (
            {"mask": {"source": "window", "window": [1, 1, 1]}, "dense_schedule": {"first_steps": 99}},
            "dense_schedule makes all 2 steps dense (first_steps 99, last_steps 0), so db-SP cannot",
        ),
        ({"mask": {"source": "window", "window": [1, 1, 1]}, "dense_schedule": {"first_steps": 1}}, None),
        ({"mask": {"source": "dense"}}, None),
    ],
)
def test_call_that_gains_nothing_is_logged(folder, capfd, config, line):
    blocks = {} if config["mask"]["source"] == "dense" else {"block_q": 8, "block_k": 8}
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, {**config, "mask": config["mask"] | blocks})
    latents(pipe, width=64, num_frames=5, guidance_scale=1.0)
    lines = [line for line in capfd.readouterr().err.splitlines() if "gained" in line or "speed up" in line]
    assert len(lines) == (line is not None), lines
    assert line is None or line in lines[0]


def enabled_pipeline(folder: str) -> Any:
    """Returns a pipeline after a call, with db-SP still on it, which holds masks' plans and closures of all kinds."""
    pipe = load("wan", folder)
    mask = {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}
    dbsp_diffusers.enable(pipe, {"mask": mask}, strategy="U1R2")
    return pipe, latents(pipe, seed=None, **BRIEF)


def test_enabled_pipeline_keeps_no_destroyed_group_alive(pool, tmp_path, folder):
    """Disables nothing first: a group that is left when Python ends may abort it."""
    for there, left in pool(2).run(left_alive, str(tmp_path), enabled_pipeline, folder):
        assert (there, left) == (2, []), "one to attend in and one to agree in"
