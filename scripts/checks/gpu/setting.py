"""What is measured: the attention of one rank of Wan2.1-T2V-14B on 8 GPUs (U8R1), and its size in a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.runtime.kernel_tables import KernelTable, build_tables, table_layout
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource

__all__ = ["DENSITIES", "GenerateJob", "Setting"]

DENSITIES = (0.2, 0.4, 0.7, 1.0)


@dataclass(frozen=True)
class Setting:
    """Sizes and device. sets: how many sets of inputs take turns, so that no run finds its inputs in the cache."""

    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16
    heads: int = 5
    all_heads: int = 40
    world: int = 8
    thw: tuple[int, int, int] = (21, 45, 80)
    width: int = 128
    sets: int = 3
    samples: int = 11
    blocks: tuple[int, ...] = (128, 64)
    densities: tuple[float, ...] = DENSITIES

    @classmethod
    def tiny(cls) -> Setting:
        """For a dry run: everything once, in seconds, on the CPU."""
        small = {"heads": 2, "all_heads": 4, "world": 2, "thw": (1, 8, 10), "width": 16, "sets": 2, "samples": 1}
        return cls(device="cpu", dtype=torch.float32, blocks=(32, 16), densities=(0.4, 1.0), **small)

    @property
    def middle(self) -> float:
        """The density at which variants are compared: the paper's, about."""
        return 0.4

    @property
    def tokens(self) -> int:
        return self.thw[0] * self.thw[1] * self.thw[2]

    def job(self, block_q: int, block_k: int, density: float) -> GenerateJob:
        request = MaskRequest(0, self.heads, self.thw)
        source = SyntheticSource(preset="wan2.1-t2v-14b", density=density, block_q=block_q, block_k=block_k)
        grid = BlockGrid.uniform(self.tokens, block_q=block_q, block_k=block_k)
        mask = BlockMask.dense(self.heads, grid) if density == 1 else source.mask(request)
        return GenerateJob(self, mask, density)


@dataclass(frozen=True, eq=False)
class GenerateJob:
    """Packed rows of all heads under one mask, as a rank has them."""

    setting: Setting
    mask: BlockMask
    density: float

    @property
    def name(self) -> str:
        return f"{self.mask.grid.block_q}×{self.mask.grid.block_k}, density {self.density}"

    @cached_property
    def table(self) -> KernelTable:
        plan = make_plan(self.mask, "U1R1")
        (kept,) = build_tables(table_layout(plan.assignment, 0).to(torch.device(self.setting.device)), self.mask)
        return kept.expanded()

    @cached_property
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Sets of q [Rq, Bq, D], k and v [Ck, Bk, D], random."""
        grid, heads, width = self.mask.grid, self.setting.heads, self.setting.width
        options = {"device": self.setting.device, "dtype": self.setting.dtype}
        shapes = [(heads * grid.nq, grid.block_q, width), *[(heads * grid.nk, grid.block_k, width)] * 2]
        return [tuple(torch.randn(s, **options) for s in shapes) for _ in range(self.setting.sets)]  # type: ignore[misc]

    @property
    def flops(self) -> float:
        """Of its dense blocks: two matrix products, a multiplication and an addition each."""
        grid = self.mask.grid
        return 4.0 * int(self.mask.bits.sum()) * grid.block_q * grid.block_k * self.setting.width

    def ordered(self, order: torch.Tensor | None) -> KernelTable:
        """The table with its rows in another order."""
        return replace(self.table, row_schedule=order)  # type: ignore[arg-type]
