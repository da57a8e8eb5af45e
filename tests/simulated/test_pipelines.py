"""Whole tiny pipelines on simulated GPUs: values, and host waits of steady steps."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_cli.tiny_models import make_tiny
from dbsp_core import SequenceGroup
from tests.gpu_node.faults import recorded
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import MASKS, own_device
from tests.support.models.tiny_pipelines import attach_pipeline, load
from tests.support.models.tiny_transformers import LATENTS, make_brief_transformer
from tests.support.outcomes import assert_near
from tests.support.shared import shared

SIZE = {"height": 64, "width": 96, "num_frames": 5, "max_sequence_length": 16}
"""2·4·6 = 48 tokens."""
TILES = (32, 32, 24, 24)
"""Height and width of a tile of the VAE, and the strides between tiles: 3 rows of 4."""

_LOADING = threading.Lock()  # transformers lets all modules be made without values meanwhile


@dataclass(frozen=True)
class Generation:
    """A pipeline and its call.

    Attributes:
        settled: How many steps it takes until the others are like one another.
        second: Whether another transformer takes the late steps (Wan2.2).
        tiled: Whether ranks decode together, tile by tile.
        guided: Whether two halves of the ranks compute a step's two CFG passes.
        offload: Whether parts are on the GPU only while they run.
    """

    mask: str = "static"
    strategy: str = "U2R1"
    steps: int = 2
    settled: int = 2
    second: bool = False
    tiled: bool = False
    guided: bool = False
    offload: bool = False
    output: str = "latent"

    @property
    def config(self) -> dict[str, Any]:
        return {"mask": MASKS[self.mask], "dense_schedule": {"first_steps": 1}}

    def pipe(self, folder: str) -> Any:
        import diffusers

        with _LOADING:
            parts = dict(load("wan", folder).components)
            parts["transformer"] = make_brief_transformer("wan", seed=6, **LATENTS)
            if self.second:
                parts |= {"transformer_2": make_brief_transformer("wan", seed=7, **LATENTS), "boundary_ratio": 0.875}
        pipe = diffusers.WanPipeline(**parts)
        pipe.set_progress_bar_config(disable=True)
        if self.tiled:
            pipe.vae.enable_tiling(*TILES)
        return pipe

    def call(self, pipe: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = pipe(
            prompt="a red ball", generator=torch.Generator().manual_seed(3), output_type=self.output,
            num_inference_steps=self.steps, guidance_scale=2.0, **SIZE, **more,
        ).frames  # fmt: skip
        return found


@shared
def on_one_process(generation: Generation, folder: str) -> torch.Tensor:
    pipe = generation.pipe(folder)
    attach_pipeline(pipe, generation.config)
    return generation.call(pipe)


def generated_on_gpus(rank: int, world: int, generation: Generation, folder: str) -> None:
    device = own_device(rank)
    expected, pipe = on_one_process(generation, folder), generation.pipe(folder)
    if generation.offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    config = generation.config | {"strategy": generation.strategy}
    dbsp_diffusers.enable(pipe, config, vae=generation.tiled, guidance=generation.guided)
    steps = SteadySteps(generation)
    assert_near(generation.call(pipe, callback_on_step_end=steps), expected)
    dbsp_diffusers.disable(pipe)
    assert steps.steady == max(0, generation.steps - generation.settled), "as many steps must have been looked at"
    assert steps.waits == {}


class SteadySteps:
    """A callback of a pipeline that counts the product's host waits in its settled steps."""

    def __init__(self, generation: Generation) -> None:
        self.steady, self.waits = 0, Counter[str]()
        self._generation, self._group = generation, SequenceGroup.from_group().auxiliary("steps of tests")

    def __call__(self, pipe: Any, step: int, timestep: Any, given: dict[str, Any]) -> dict[str, Any]:
        self._group.barrier()
        if step >= self._generation.settled:
            self.steady += 1
            self.waits.update(recorded.waits_of_product())
        self._group.barrier()
        recorded.begin_step()
        self._group.barrier()
        return given


CASES = {
    "two transformers": (2, Generation(steps=5, settled=4, second=True)),
    "guidance on two halves": (4, Generation("predicted", "U1R2", steps=3, guided=True)),
    "parts that are on the GPU while they run": (2, Generation(steps=1, offload=True, tiled=True, output="pt")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("wan", tmp_path_factory.mktemp("tiny") / "wan"))


@pytest.mark.parametrize("name", CASES)
def test_pipeline_on_gpus_equals_one_process_without_host_waits(gpu_node: GpuNode, folder: str, name: str) -> None:
    world, generation = CASES[name]
    gpu_node.run(world, generated_on_gpus, generation, folder)
