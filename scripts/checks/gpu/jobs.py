"""Packed rows of a rank's heads under a synthetic mask, and dense attention of the same heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.runtime.tables import ChunkTables, KernelTable, build_tables, dense_spans_of, table_layout
from dbsp_core.sources import MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from dbsp_kernels import KernelInputs, attend_dense_part, block_attention
from dbsp_kernels.triton.launch import capability_of
from dbsp_kernels.triton.tiles import HOPPER, Tiles, row_slots, tiles_for
from scripts.checks.gpu.clock import Work
from scripts.checks.gpu.setting import Model, Setting, Shape

LOOPS = ("late", "scale_first", "plain")  # schedules of Hopper's forward kernel that are compared


@dataclass(frozen=True, eq=False)
class PackedJob:
    """Packed rows of `heads` heads under one mask, as a rank has them."""

    setting: Setting
    shape: Shape
    model: Model
    heads: int
    density: float

    @cached_property
    def mask(self) -> BlockMask:
        blocks = {"block_q": self.shape.block_q, "block_k": self.shape.block_k}
        if self.density == 1:
            return BlockMask.dense(self.heads, BlockGrid(self.model.tokens, 0, **blocks))
        source = SyntheticSource(preset="wan2.1-t2v-14b", density=self.density, **blocks)
        return source.mask(MaskRequest(0, self.heads, self.model.thw))

    @cached_property
    def tables(self) -> ChunkTables:
        device = torch.device(self.setting.device)
        layout = table_layout(make_plan(self.mask, "U1R1"), 0).to(device)
        return build_tables(layout, self.mask, dense_spans_of(self.mask, device))

    @cached_property
    def table(self) -> KernelTable:
        q, blocks = self.inputs[0][0], (self.shape.block_q, self.shape.block_k)
        (table,) = self.tables.expanded(slots=row_slots(q, blocks))
        return table

    @cached_property
    def inputs(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Sets of q [Rq, Bq, D], k and v [Ck, Bk, D], random."""
        grid, shape = self.mask.grid, self.shape
        options = {"device": self.setting.device, "dtype": shape.dtype}
        sizes = [(self.heads * grid.nq, grid.block_q, shape.head_dim)]
        sizes += [(self.heads * grid.nk, grid.block_k, shape.head_dim)] * 2
        return [tuple(torch.randn(size, **options) for size in sizes) for _ in range(self.setting.sets)]

    @cached_property
    def flops(self) -> float:
        """Floating-point operations of its active blocks: two products, a multiplication and an addition each."""
        grid = self.mask.grid
        return 4.0 * int(self.mask.bits.sum()) * grid.block_q * grid.block_k * self.shape.head_dim

    def work(self, kernel: str, **options: Any) -> Work:

        def attend(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = self.inputs[i % len(self.inputs)]
            return block_attention(*inputs, **vars(self.table), kernel=kernel, **options)

        return attend

    def tiled(self, tiles: Tiles) -> Work:
        from dbsp_kernels.triton.forward import triton_attention

        def attend(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            inputs = self.inputs[i % len(self.inputs)]
            scale = self.shape.head_dim**-0.5
            return triton_attention(KernelInputs(*inputs, **vars(self.table), scale=scale), tiles=tiles)

        return attend

    def dense_rows(self) -> Work:
        """Returns attention of all rows by the fused kernel, if the mask is dense."""
        (dense,) = self.tables.dense
        assert dense is not None
        (part,) = dense.parts

        def attend(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            q, k, v = (tensor[None] for tensor in self.inputs[i % len(self.inputs)])
            return attend_dense_part(q, k, v, part, self.shape.head_dim**-0.5)

        return attend

    def error(self, work: Work, rows: int = 16) -> float:
        """Returns the relative error of the shortest and longest rows, against float64."""
        (q, k, v), (out, _) = self.inputs[0], work(0)
        order = self.table.kv_count.argsort()
        picked = torch.cat([order[: rows // 2], order[-(rows // 2) :]])
        table = {name: getattr(self.table, name)[picked] for name in ("kv_index", "kv_count")}
        wide = (q[picked].double(), k.double(), v.double())
        expected, _ = block_attention(*wide, **table, kv_len=self.table.kv_len, kernel="reference")
        error = (out[picked].double() - expected).norm() / expected.norm()
        return float(error) if bool(out.isfinite().all()) else float("nan")


def used_tiles(setting: Setting, shape: Shape) -> Tiles:
    """Returns the tiles that `triton` takes for a shape on this device, Hopper's in the interpreter."""
    on_gpu = torch.cuda.is_available() and not setting.simulated
    return tiles_for(*shape, capability_of(torch.device(setting.device)) if on_gpu else HOPPER)


def tile_variants(setting: Setting, shape: Shape) -> dict[str, Tiles]:
    """Returns the tiles in use, first, and those with the other loops, and with 64 or 128 queries a program."""
    used = used_tiles(setting, shape)
    bases = [used]
    for queries, warps in ((64, 4), (128, 8)):
        if queries != used.queries and queries <= shape.block_q:
            bases.append(replace(used, queries=queries, keys=min(queries, shape.block_k), warps=warps))
    tiles = [replace(base, loop=loop) for base in bases for loop in (used.loop, *LOOPS)]
    return {f"{one.loop}, {one.queries} queries": one for one in tiles}


def dense_works(
    setting: Setting, model: Model, heads: int, dtype: torch.dtype, at_once: int | None = None
) -> dict[str, Work]:
    """Returns dense attention of some heads by each library that does it here, all `at_once` or so many."""
    size = 3, 1, heads, model.tokens, model.head_dim
    sets = [torch.randn(size, device=setting.device, dtype=dtype) for _ in range(setting.sets)]

    def sdpa(backend: SDPBackend) -> Work:
        def work(i: int) -> None:
            with sdpa_kernel(backend):
                for qkv in sets[i % len(sets)].split(at_once or heads, dim=2):
                    F.scaled_dot_product_attention(*qkv)

        return work

    backends = ("MATH",) if setting.dry else ("CUDNN_ATTENTION", "FLASH_ATTENTION")
    works = {f"dense, {name.partition('_')[0].lower()}": sdpa(getattr(SDPBackend, name)) for name in backends}
    return {name: work for name, work in works.items() if runs(work)}


def runs(work: Callable[[int], object]) -> bool:
    """Returns False if this machine, or this library, cannot do it."""
    try:
        work(0)
    except Exception as error:
        if "illegal" in str(error):  # the device has failed: nothing after it would be true
            raise
        print(f"not here: {type(error).__name__}: {error}")
        return False
    return True
