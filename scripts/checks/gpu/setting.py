"""Sizes of the GPU suite: those of published models on a GPU, and tiny ones for a dry run."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import yaml

from dbsp_core.models.table import signature_of_name
from dbsp_core.utils.yaml_file import shipped_configs
from scripts.checks.gpu.clock import Sampler

MOST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of an attention against float64 that is correct."""


class Shape(NamedTuple):
    """Sizes and dtype that a kernel is compiled for."""

    block_q: int
    block_k: int
    head_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.block_q}×{self.block_k}, D {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"


class Model(NamedTuple):
    """A model's attention: its name, the latent video (frames, rows, columns), heads and their size."""

    name: str
    thw: tuple[int, int, int]
    heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        return self.thw[0] * self.thw[1] * self.thw[2]


LARGE = Model("Wan2.1-14B, 81 frames of 1280 × 720", (21, 45, 80), 40, 128)
SMALL = Model("Wan2.1-1.3B, 81 frames of 832 × 480", (21, 30, 52), 12, 128)
LONG = Model("Wan2.1-14B, 161 frames of 1280 × 720", (41, 45, 80), 40, 128)
MAIN = tuple(Shape(*blocks, 128, torch.bfloat16) for blocks in ((128, 64), (64, 64), (128, 128)))
"""The shapes that rates are measured at: those that Wan's and HunyuanVideo's masks are shipped with."""
ODD = ((192, 16, 80), (64, 64, 256))  # query blocks, key blocks and head sizes that nobody ships, and a user may set


def shipped_shapes() -> list[Shape]:
    """Returns the shapes with D ≥ 64 that a shipped configuration can ask for, 64×64 blocks among them, largest first.

    Where a configuration leaves the dtype open, it is bfloat16 here.
    """
    shapes = set()
    for path in sorted(shipped_configs().glob("*.yaml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        signature, mask = signature_of_name(settings["model"]), settings.get("mask", {})
        if signature is None:
            raise ValueError(f"{path.name} is for {settings['model']}, which is not in the table of models")
        name = settings.get("dtype", "auto")
        dtype = torch.bfloat16 if name == "auto" else getattr(torch, name)
        blocks = mask.get("block_q", 64), mask.get("block_k", 64)
        shapes |= {Shape(*of, signature.sizes[2], dtype) for of in (blocks, (64, 64)) if signature.sizes[2] >= 64}
    return sorted(shapes, key=lambda shape: (-shape.head_dim, -shape.block_q * shape.block_k, str(shape.dtype)))


@dataclass(frozen=True)
class Setting:
    """Sizes and device.

    densities: shares of active blocks at which kernels are measured, the headline's first
    layers, steps: attentions that are timed on each rank alone
    """

    dry: bool = False
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    large: Model = LARGE
    small: Model = SMALL
    long: Model = LONG
    main: tuple[Shape, ...] = MAIN
    world: int = 8  # ranks of the plans that are measured
    densities: tuple[float, ...] = (0.4, 0.2, 0.7, 1.0)
    sets: int = 2  # sets of inputs that take turns
    samples: int = 5  # measurements of which the median is taken
    layers: int = 4
    steps: int = 4

    @classmethod
    def tiny(cls, device: str) -> Setting:
        """Returns the sizes of a dry run: everything once, in seconds."""
        model = Model("tiny", (1, 8, 10), 4, 16)
        return cls(
            dry=True,
            device=device,
            dtype=torch.float32,  # the interpreter rounds to bfloat16 otherwise than a GPU
            large=model,
            small=model,
            long=model,
            main=(Shape(32, 16, 16, torch.float32),),
            world=2,
            densities=(0.4, 1.0),
            sets=1,
            samples=1,
            layers=1,
            steps=1,
        )

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.device, self.samples)

    @property
    def simulated(self) -> bool:
        """True for a dry run on simulated GPUs, in whose interpreter everything takes seconds."""
        return self.dry and self.device != "cpu"

    @property
    def local_heads(self) -> int:
        """Heads of the large model that a rank of `world` has without a ring."""
        return max(1, self.large.heads // self.world)

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies of `world` ranks that are timed: Ulysses and a ring."""
        ring = f"U1R{self.world}"
        return (ring,) if self.simulated else (f"U{self.world}R1", ring)

    @property
    def how(self) -> str:
        """Says whether times mean something."""
        return "simulated, times mean nothing" if self.simulated else "dry run, times mean nothing" * self.dry or "GPU"

    @property
    def other_shapes(self) -> list[Shape]:
        """Shapes whose kernels are checked besides `main`; one that tiles do not divide in a dry run."""
        if self.dry:
            return [Shape(21, 24, 24, torch.float16)]
        shipped = [shape for shape in shipped_shapes() if shape not in self.main]
        exact = [shape._replace(dtype=torch.float32) for shape in self.main[:1]]
        return [*shipped, *exact, *(Shape(*odd, self.dtype) for odd in ODD)]

    def device_works(self) -> bool:
        """Frees what a case has left. Returns False once a kernel has failed so that its process cannot go on."""
        gc.collect()
        if not torch.cuda.is_available():
            return True
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            return False
        return True
