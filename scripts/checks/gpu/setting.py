"""Sizes of the GPU suite: those of published models on a GPU, and tiny ones for a dry run on the CPU."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import yaml

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.models.table import signature_of_name
from dbsp_core.runtime.tables import KernelTable, build_tables, table_layout
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from dbsp_core.utils.yaml_file import shipped_configs
from dbsp_kernels import block_attention
from scripts.checks.gpu.clock import Sampler, Work

MOST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Relative error of an attention against float64 that is correct."""

ODD = ((48, 33, 24), (17, 160, 40), (192, 16, 80), (64, 64, 256))
"""Query blocks, key blocks and head sizes that nobody ships, and a user may set."""


class Shape(NamedTuple):
    """Sizes and dtype that a kernel is compiled for."""

    block_q: int
    block_k: int
    head_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.block_q}×{self.block_k}, D {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"


def shipped_shapes() -> list[Shape]:
    """Returns every shape that a shipped configuration can ask for, and 64×64 blocks, the default of masks."""
    found = set()
    for path in sorted(shipped_configs().glob("*.yaml")):
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        signature, mask = signature_of_name(settings["model"]), settings.get("mask", {})
        if signature is None:
            raise ValueError(f"{path.name} is for {settings['model']}, which is not in the table of models")
        head_dim = signature.sizes[2]
        block_q, block_k = (mask.get(name, 64) for name in ("block_q", "block_k"))
        given = settings.get("dtype", "auto")
        dtypes = list(MOST_ERROR) if given == "auto" else [getattr(torch, given)]
        found |= {Shape(*blocks, head_dim, dtype) for blocks in ((block_q, block_k), (64, 64)) for dtype in dtypes}
    return sorted(found, key=lambda shape: (str(shape.dtype), shape[:3]))


@dataclass(frozen=True)
class Setting:
    """Sizes and device.

    Attributes:
        thw, heads, head_dim, ffn: The video and the transformer that are measured: Wan2.1-T2V-14B's.
        world: Ranks of the plans that are measured.
        densities: Shares of active blocks at which kernels are measured.
        sets: Sets of inputs that take turns.
        samples: Measurements of which the median is taken.
        steps: Steps of the denoising that is timed, by `layers` layers.
    """

    dry: bool = False
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    thw: tuple[int, int, int] = (21, 45, 80)
    heads: int = 40
    head_dim: int = 128
    world: int = 8
    densities: tuple[float, ...] = (0.2, 0.4, 1.0)
    sets: int = 2
    samples: int = 9
    ffn: int = 13824
    layers: int = 4
    steps: int = 10

    @classmethod
    def tiny(cls, device: str) -> Setting:
        """Returns the sizes of a dry run: everything once, in seconds."""
        video = {"ffn": 64, "layers": 2, "steps": 2}
        small = {"thw": (1, 8, 10), "heads": 4, "head_dim": 16, "world": 2, "sets": 1, "samples": 1}
        return cls(True, device, torch.float32, densities=(0.4, 1.0), **small, **video)

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.device, self.samples)

    @property
    def simulated(self) -> bool:
        """True for a dry run on simulated GPUs, in whose interpreter everything takes seconds."""
        return self.dry and self.device != "cpu"

    @property
    def tokens(self) -> int:
        return self.thw[0] * self.thw[1] * self.thw[2]

    @property
    def own_heads(self) -> int:
        """Heads of a rank of `world` without ring."""
        return self.heads // self.world

    @property
    def shapes(self) -> list[Shape]:
        """Shapes whose kernels are checked: shipped ones and odd ones, or one of each in a dry run."""
        found = shipped_shapes()
        if not self.dry:
            return found + [Shape(*odd, dtype) for odd in ODD for dtype in MOST_ERROR]
        odd = next(shape for shape in found if shape.block_q % 16 and shape.dtype == torch.float16)
        return [Shape(16, 16, 16, torch.float32), odd]  # the interpreter rounds to bfloat16 otherwise than a GPU

    @property
    def measured(self) -> list[Shape]:
        """Shapes whose rates are measured: those of 14B and 5B models in bfloat16."""
        if self.dry:
            return [Shape(32, 16, self.head_dim, self.dtype)]
        return [shape for shape in shipped_shapes() if shape.dtype == self.dtype]

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

    def job(self, shape: Shape, density: float) -> PackedJob:
        """Makes the packed rows of a rank's heads under a synthetic mask."""
        blocks = {"block_q": shape.block_q, "block_k": shape.block_k}
        grid = BlockGrid(self.tokens, 0, **blocks)
        if density == 1:
            return PackedJob(self, shape, BlockMask.dense(self.own_heads, grid), density)
        source = SyntheticSource(preset="wan2.1-t2v-14b", density=density, **blocks)
        return PackedJob(self, shape, source.mask(MaskRequest(0, self.own_heads, self.thw)), density)


@dataclass(frozen=True, eq=False)
class PackedJob:
    """Packed rows of all heads under one mask, as a rank has them."""

    setting: Setting
    shape: Shape
    mask: BlockMask
    density: float

    @property
    def name(self) -> str:
        return f"{self.shape.name}, density {self.density}"

    @cached_property
    def table(self) -> KernelTable:
        plan = make_plan(self.mask, "U1R1")
        (kept,) = build_tables(table_layout(plan, 0).to(torch.device(self.setting.device)), self.mask)
        return kept.expanded()

    @cached_property
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Sets of q [Rq, Bq, D], k and v [Ck, Bk, D], random."""
        grid, heads, head_dim = self.mask.grid, self.mask.heads, self.shape.head_dim
        options = {"device": self.setting.device, "dtype": self.shape.dtype}
        shapes = [(heads * grid.nq, grid.block_q, head_dim), *[(heads * grid.nk, grid.block_k, head_dim)] * 2]
        return [tuple(torch.randn(s, **options) for s in shapes) for _ in range(self.setting.sets)]

    def work(self, kernel: str, **options: Any) -> Work:
        """Returns attention by a kernel, to one set of inputs after another."""

        def attend(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = self.inputs[i % self.setting.sets]
            return block_attention(*inputs, **vars(self.table), kernel=kernel, **options)

        return attend

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of its active blocks: two products, a multiplication and an addition each."""
        grid = self.mask.grid
        return 4.0 * int(self.mask.bits.sum()) * grid.block_q * grid.block_k * self.shape.head_dim
