"""What the simulated node runs: whole tiny Wan pipelines, from prompt to frames, against one process on the CPU."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

import dbsp_diffusers
from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import StepClock
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.sharding.generations import Generations
from tests.gpu_node.faults import recorded
from tests.simulated.model_cases import MASKS, apart, brief, own_device
from tests.support.models.tiny_pipelines import load
from tests.support.models.tiny_transformers import LATENTS
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

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
    guidance: float = 2.0
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
            parts = dict(load("wan", folder).components) | {"transformer": brief("wan", seed=6, **LATENTS)}
            if self.second:
                parts |= {"transformer_2": brief("wan", seed=7, **LATENTS), "boundary_ratio": 0.875}
        pipe = diffusers.WanPipeline(**parts)
        pipe.set_progress_bar_config(disable=True)
        if self.tiled:
            pipe.vae.enable_tiling(*TILES)
        return pipe

    def call(self, pipe: Any, **more: Any) -> torch.Tensor:
        found: torch.Tensor = pipe(
            prompt="a red ball", generator=torch.Generator().manual_seed(3), output_type=self.output,
            num_inference_steps=self.steps, guidance_scale=self.guidance, **SIZE, **more,
        ).frames  # fmt: skip
        return found


@shared
def on_one_process(generation: Generation, folder: str) -> torch.Tensor:
    pipe, config = generation.pipe(folder), DbspConfig.load(generation.config)
    transformers, generations = transformers_of(pipe), Generations(pipe, SequenceGroup(0, 1))
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    for name, part in transformers.items():
        attach_single_process(part, config.for_transformer(name), generations.steps, clock)
    return generation.call(pipe)


def generated_on_gpus(rank: int, world: int, generation: Generation, folder: str) -> tuple[float, int, dict[str, int]]:
    """Returns the largest difference from one process on the CPU, and the number and host waits of settled steps."""
    device = own_device(rank)
    expected, pipe = on_one_process(generation, folder), generation.pipe(folder)
    if generation.offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    config = generation.config | {"strategy": generation.strategy}
    dbsp_diffusers.enable(pipe, config, vae=generation.tiled, guidance=generation.guided)
    steps = SteadySteps(generation)
    found = generation.call(pipe, callback_on_step_end=steps)
    dbsp_diffusers.disable(pipe)
    return apart([found], [expected]), steps.steady, steps.waits


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
