"""Every model's own pipeline: its steps and CFG passes in its published dtype, and on two ranks, as in one process.

Pipelines cast timesteps to their latents' dtype; of bfloat16's 8 bits, neighbours are equal, with a large shift after
few steps already. Steps must not be inferred from them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.session_observer import SessionObserver
from dbsp_diffusers.models import ARCHITECTURES
from dbsp_diffusers.sharding.generations import LEFT_OUT, Generations
from tests.diffusers.models.model_cases import WITHOUT_GRID
from tests.diffusers.models.pipeline_cases import BF16, CASES, WITHOUT_PIPELINE, Case, made, make_pipe, marked
from tests.support.models.tiny_pipelines import attach_pipeline
from tests.support.models.tiny_transformers import TINY
from tests.support.outcomes import apart
from tests.support.references import by_first_rank

APART = ("CogVideoXPipeline", "CosmosTextToWorldPipeline", "Flux2Pipeline", "QwenImageLayeredPipeline")
"""Pipelines whose timesteps are never near to each other."""


class Moments(SessionObserver):
    """(step, CFG pass) of each forward pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def begin(self, step: Any, *others: Any) -> None:
        self.seen.append((step.step, step.cfg_branch))


def _mask(case: Case) -> dict[str, Any]:
    """Returns a mask that needs no grid where there is none."""
    source = {"source": "sparge", "cdf": 0.9} if case.tiny in WITHOUT_GRID else {"source": "window"}
    return source | {"block_q": 16, "block_k": 16}


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Computes a linear layer in float32, in which CPUs are ten times as fast."""
    return (x.float() @ weight.float().T + (0 if bias is None else bias.float())).to(x.dtype)


def _with_near_timesteps(scheduler: Any) -> Any:
    """Returns a scheduler whose first timesteps are equal in bfloat16, if it has a shift."""
    shifts = {"shift": 100.0, "flow_shift": 100.0, "base_shift": 4.6, "max_shift": 4.6}
    config = scheduler.config
    return type(scheduler).from_config(config, **{name: shifts[name] for name in shifts if name in config})


@pytest.mark.parametrize("case", [marked(case) for case in CASES])
def test_pipeline_in_bfloat16_counts_its_steps_and_passes(case):
    torch.manual_seed(0)
    pipe, ends = make_pipe(case), {"first_steps": 1, "last_steps": 2}
    pipe.scheduler = _with_near_timesteps(pipe.scheduler)
    config = {"mask": _mask(case), "dense_schedule": ends}
    session = dbsp_diffusers.enable(pipe, config)
    dense: list[bool] = []
    moments = Moments()
    session.observers = [*session.observers, moments]
    provider = session._provider
    moments.mask_used = lambda layer, key: dense.append(provider._is_dense(layer)) if layer == 0 else None
    for steps in (6, 4):  # a second call begins anew
        moments.seen.clear()
        dense.clear()
        with case.around(BF16), mock.patch("torch.nn.functional.linear", _linear):
            pipe(num_inference_steps=steps, output_type=case.output, **case.arguments(BF16))
        assert moments.seen == [(step, branch) for step in range(steps) for branch in range(case.passes)]
        timesteps = pipe.scheduler.timesteps.to(BF16)
        neighbours_are_equal = bool((timesteps[1:] == timesteps[:-1]).any())
        assert neighbours_are_equal or steps < 6 or case.pipeline in APART
        assert dense == [step < 1 or step >= steps - 2 for step, _ in moments.seen]


def test_pipelines_whose_loops_leave_out_the_last_step_are_known():
    families = ("chronoedit", "cogvideo", "flux", "flux2", "hunyuan_video", "hunyuan_video1_5", "kandinsky5", "ltx")
    others = ("qwenimage", "skyreels_v2", "wan")
    folders = [Path(diffusers.__file__).parent / "pipelines" / name for name in (*families, *others)]
    files = [path for folder in folders for path in folder.glob("pipeline_*.py")]
    assert len(files) > 40
    sources = [path.read_text() for path in files]
    left_out = [source for source in sources if "timesteps[:-1]" in source]
    assert {name for source in left_out for name in re.findall(r"class (\w+Pipeline)\(", source)} == set(LEFT_OUT)


def test_pipeline_that_leaves_out_the_last_step_has_one_less():
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(8)
    pipe = type("LTXI2VLongMultiPromptPipeline", (), {"scheduler": scheduler})()
    generations = Generations(pipe, SequenceGroup(0, 1))
    assert generations.steps() == 7
    generations._call, pipe._num_timesteps = 1, 6  # as within a call of the pipeline
    assert generations.steps() == 5


def test_every_known_class_has_a_pipeline_here():
    covered = {TINY[case.tiny].cls for case in CASES}
    assert covered | set(WITHOUT_PIPELINE) == set(ARCHITECTURES)


TOLERANCE = 1e-5
COSMOS_TOLERANCE = 2**-15
"""Two roundings of float32 in Cosmos' latents, which start at 80 times their size; it has no float64."""
SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 4, "block_k": 4, "dense_text": False}
USUAL = ("Cog", "HunyuanVideo15", "LTX2P", "QwenImageLayered", "ZImage")
"""How the names of pipelines begin that differ most around a transformer; all others run in the long part."""
NUMBERS = [
    pytest.param(number, id=case.pipeline, marks=() if case.pipeline.startswith(USUAL) else pytest.mark.long)
    for number, case in enumerate(CASES)
]


@by_first_rank
def one_process(number: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a pipeline gives with dense attention, and with the mask."""
    torch.manual_seed(0)
    pipe = make_pipe(CASES[number], dtype)
    dense = made(pipe, CASES[number], dtype)
    attach_pipeline(pipe, {"mask": SPARGE})
    return dense, made(pipe, CASES[number], dtype)


def run_pipeline(rank: int, world: int, number: int, dtype: torch.dtype, tolerance: float) -> None:
    dense, expected = one_process(number, dtype)
    torch.manual_seed(0)
    pipe = make_pipe(CASES[number], dtype)
    dbsp_diffusers.enable(pipe, {"mask": SPARGE, "strategy": "U1R2"})
    found = made(pipe, CASES[number], dtype)
    dbsp_diffusers.disable(pipe)
    assert apart(found, expected) <= tolerance
    assert apart(expected, dense) > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.parametrize("number", NUMBERS)
def test_pipeline_equals_one_process(pool, number):
    """Runs LTX-2 in float64: its guidance multiplies rounding, by which in float32 a predicted block is another."""
    name = CASES[number].pipeline
    dtype = torch.float64 if name.startswith("LTX2") else torch.float32
    pool(2).run(run_pipeline, number, dtype, COSMOS_TOLERANCE if name.startswith("Cosmos") else TOLERANCE)
