"""The measurements. Each gives rows: what, its value, and the goal where there is one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, make_plan
from dbsp_core.comm.route_building import build_route
from dbsp_core.planning.wire_format import WIRE_FORMATS
from dbsp_kernels import KernelInputs, KernelRequirements, available, block_attention
from dbsp_kernels.packing.segment_copy import copy_segments, gather_segments
from dbsp_kernels.triton.tile_config import HOPPER, Tiles, tiles_for
from scripts.checks.gpu.clock import Sampler
from scripts.checks.gpu.setting import GenerateJob, Setting
from tests.kernels.kernel_changes import CHANGES, without

__all__ = ["Row", "everything", "largest_error"]


CONTENDERS = ("fa4", "triton")
GOALS = {(128, "triton"): "≥ 0.75", (128, "fa4"): "≥ 0.9", (64, "triton"): "≥ 0.55"}
"""Rates over dense SDPA's best, by block and kernel."""


@dataclass(frozen=True)
class Row:
    """goal: "≥ 0.8" or "≤ 1.05", or "" where a number is only noted."""

    what: str
    value: float
    unit: str
    goal: str = ""

    @property
    def met(self) -> bool | None:
        if not self.goal:
            return None
        sign, bound = self.goal.split()
        return self.value >= float(bound) if sign == "≥" else self.value <= float(bound)


def everything(setting: Setting, sampler: Sampler) -> Iterator[Row]:
    best = yield from dense_rate(setting, sampler)
    for block in setting.blocks:
        yield from sparse_rates(setting, sampler, block, best)
        middle = setting.job(block, block, setting.middle)
        yield from orders(middle, sampler)
        yield from accumulating(middle, sampler)
    yield from packing(setting, sampler)
    yield from against_sparge(setting, sampler)
    for block in setting.blocks:
        yield from changes(setting.job(block, block, setting.middle), sampler)
        yield from variants(setting.job(block, block, setting.middle), sampler)


def largest_error(job: GenerateJob, kernel: str = "triton", rows: int = 16) -> float:
    """Relative error of the first rows of the order and the last, against float64."""
    q, k, v = job.inputs[0]
    out, _ = block_attention(q, k, v, **vars(job.table), kernel=kernel)
    picked = torch.cat([job.table.row_schedule[: rows // 2], job.table.row_schedule[-(rows // 2) :]]).long()
    table = {name: getattr(job.table, name)[picked] for name in ("kv_index", "kv_count")}
    wide = (q[picked].double(), k.double(), v.double())
    expected, _ = block_attention(*wide, **table, kv_len=job.table.kv_len, kernel="reference")
    error = (out[picked].double() - expected).norm() / expected.norm()
    return float(error) if bool(out.isfinite().all()) else float("nan")


def dense_rate(setting: Setting, sampler: Sampler) -> Iterator[Row]:
    """Every dense SDPA backend there is on the same heads and tokens. Returns the best rate, TFLOP/s."""
    shape = (1, setting.heads, setting.tokens, setting.width)
    options = {"device": setting.device, "dtype": setting.dtype}
    sets = [[torch.randn(shape, **options) for _ in range(3)] for _ in range(setting.sets)]
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if setting.device != "cuda":
        backends = {"math": SDPBackend.MATH}
    best = 0.0
    for name, backend in backends.items():

        def work(i: int, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*sets[i % len(sets)])

        try:
            ms = sampler.medians({name: work})[name]
        except RuntimeError:  # this torch, or this GPU, lacks the backend
            continue
        rate = 4.0 * setting.heads * setting.tokens**2 * setting.width / ms / 1e9
        best = max(best, rate)
        yield Row(f"dense SDPA, {name}", rate, "TFLOP/s")
    return best


def sparse_rates(setting: Setting, sampler: Sampler, block: int, best: float) -> Iterator[Row]:
    """Every kernel's rate over dense SDPA's, and linearity in density."""
    needs = KernelRequirements((block, block), setting.width, lse=True, ragged_rows=True)
    there = [name for name in CONTENDERS if name in available(setting.device, setting.dtype, needs)]
    per_density = {}
    for density in setting.densities:
        job = setting.job(block, block, density)
        right = []
        for kernel in there:
            error = largest_error(job, kernel)
            yield Row(f"{job.name}: relative error, {kernel}", error, "‖·‖", "≤ 0.008")
            right += [kernel] if error <= 0.008 else []

        def work(kernel: str, job: GenerateJob = job):  # type: ignore[no-untyped-def]
            def once(i: int) -> object:
                return block_attention(*job.inputs[i % setting.sets], **vars(job.table), kernel=kernel)

            return once

        ms = sampler.medians({name: work(name) for name in right})
        for kernel in right:
            rate = job.flops / ms[kernel] / 1e9
            goal = GOALS.get((128 if block == setting.blocks[0] else 64, kernel), "")
            yield Row(f"{job.name}: rate, {kernel}", rate, "TFLOP/s")
            yield Row(f"{job.name}: rate / dense SDPA, {kernel}", rate / best, "", goal)
        if "triton" in right:
            per_density[density] = ms["triton"] * job.mask.bits.numel() / int(job.mask.bits.sum())
    if 1.0 in per_density:
        sparsest = min(per_density)
        linearity = per_density[sparsest] / per_density[1.0]
        yield Row(f"{block}×{block}: linearity at {sparsest}", linearity, "", "≤ 1.05")


def orders(job: GenerateJob, sampler: Sampler) -> Iterator[Row]:
    """What the order of rows is worth: as packed, or by count alone, over head by head with heavy rows first."""
    by_count = torch.argsort(job.table.kv_count, descending=True, stable=True).to(torch.int32)
    as_packed = torch.arange(len(by_count), dtype=torch.int32, device=by_count.device)
    tables = {"table's": job.table, "as packed": job.ordered(as_packed), "by count": job.ordered(by_count)}

    def work(name: str):  # type: ignore[no-untyped-def]
        return lambda i: block_attention(*job.inputs[i % len(job.inputs)], **vars(tables[name]), kernel="triton")

    ms = sampler.medians({name: work(name) for name in tables})
    for name in ("as packed", "by count"):
        yield Row(f"{job.name}: rows {name} / the table's order", ms[name] / ms["table's"], "")


def accumulating(job: GenerateJob, sampler: Sampler) -> Iterator[Row]:
    """Merging into a partial result over writing a plain one, and the same by a merge kernel of its own."""
    q, k, v = job.inputs[0]
    table = vars(job.table)
    partial = block_attention(q, k, v, **table, kernel="triton", out_dtype=torch.float32)

    def plain(i: int) -> object:
        return block_attention(*job.inputs[i % len(job.inputs)], **table, kernel="triton")

    def merged(i: int) -> object:
        return block_attention(*job.inputs[i % len(job.inputs)], **table, kernel="triton", partial=partial)

    ms = sampler.medians({"plain": plain, "merged": merged})
    yield Row(f"{job.name}: accumulate / plain forward", ms["merged"] / ms["plain"], "", "≤ 1.03")


def changes(job: GenerateJob, sampler: Sampler) -> Iterator[Row]:
    """What each change of the kernel is worth: the time without it over the time with all."""
    from dbsp_kernels.triton.forward import triton_attention

    with tempfile.TemporaryDirectory() as folder:
        kernels = {"all": triton_attention}
        kernels |= {change: without(change, Path(folder)).triton_attention for change in CHANGES}

        def work(name: str):  # type: ignore[no-untyped-def]
            def once(i: int) -> object:
                tensors, scale = job.inputs[i % len(job.inputs)], job.setting.width**-0.5
                return kernels[name](KernelInputs(*tensors, **vars(job.table), scale=scale))

            return once

        ms = sampler.medians({name: work(name) for name in kernels})
    for name in CHANGES:
        yield Row(f"{job.name}: {name} / now", ms[name] / ms["all"], "")


def variants(job: GenerateJob, sampler: Sampler) -> Iterator[Row]:
    """Other tiles than the table's, and pointers instead of the copy engine: over what is used now."""
    from dbsp_kernels.triton.forward import capability_of, triton_attention

    block_q, block_k = job.mask.grid.block_q, job.mask.grid.block_k
    on_gpu = job.setting.device == "cuda"
    capability = capability_of(torch.device("cuda")) if on_gpu else HOPPER
    used = tiles_for(block_q, block_k, job.setting.width, job.setting.dtype, capability)
    tried = {
        Tiles(used.queries, keys, warps, stages)
        for keys in {min(64, block_k), block_k}
        for warps in ((4, 8) if on_gpu else (8,))
        for stages in ((3, 4, 5, 6) if on_gpu else (3,))
    }
    works = {}
    for tiles in sorted({used, *tried}, key=lambda t: (t != used, t.keys, t.warps, t.stages)):
        for copies in (True, False) if on_gpu and tiles == used else (True,):

            def work(i: int, tiles: Tiles = tiles, copies: bool = copies) -> object:
                tensors, scale = job.inputs[i % len(job.inputs)], job.setting.width**-0.5
                inputs = KernelInputs(*tensors, **vars(job.table), scale=scale)
                return triton_attention(inputs, tiles=tiles, use_tma=copies)

            name = f"{tiles.queries}×{tiles.keys}, {tiles.warps} warps, {tiles.stages} stages"
            try:
                work(0)
            except Exception as error:
                if "OutOfResources" not in type(error).__name__:
                    raise
                continue  # does not fit shared memory or registers
            works[name + ("" if copies else ", pointers")] = work
    ms = sampler.medians(works)
    first, *others = ms
    for name in others:
        yield Row(f"{job.name}: {name} / {first}", ms[name] / ms[first], "")


def packing(setting: Setting, sampler: Sampler) -> Iterator[Row]:
    """Packing and unpacking q, k, v of a rank over copies of the same bytes; the exchange itself is left out.

    And the same as int8, which is also read back; without the mean of keys.
    """
    grid = BlockGrid.uniform(setting.tokens, setting.blocks[-1])
    plan = make_plan(BlockMask.dense(setting.all_heads, grid), f"U{setting.world}R1")
    layout = SequenceLayout.contiguous(setting.tokens, setting.world)
    route = build_route(plan.assignment, layout, 0, layout.shard, torch.device(setting.device))
    (exchange,) = route.dispatch_exchanges
    options = {"device": setting.device, "dtype": setting.dtype}
    width, heads = setting.width, setting.all_heads
    sent = [torch.empty(sum(exchange.sent), 1, width, **options) for _ in range(setting.sets)]
    came = [torch.randn(sum(exchange.received), 1, width, **options) for _ in range(setting.sets)]
    rows = torch.empty(1, 1, route.q_places, width, **options)
    blocks = torch.empty(1, 2, route.kv_places, width, **options)
    twins = [torch.empty_like(buffer) for buffer in (sent[0], came[0])]
    wire, mean = WIRE_FORMATS["int8"], torch.zeros(1, heads, width, device=setting.device)
    written = [wire.empty(rows, *buffer.shape[:2]).zero_() for buffer in (sent[0], came[0])]
    written_packed = [wire.empty(rows, *packed.shape[:3]).zero_() for packed in (rows, blocks)]
    for strides, order in (("[B,H,n,D]", (0, 1, 2)), ("[B,n,H,D]", (0, 2, 1))):
        shape = (3, heads, layout.shard, width) if order == (0, 1, 2) else (3, layout.shard, heads, width)
        hosts = [torch.randn(shape, **options).permute(*order, 3)[:, None] for _ in range(setting.sets)]

        def ours(i: int, hosts: list[torch.Tensor] = hosts) -> None:
            turn = i % setting.sets
            buffer = sent[turn].transpose(0, 1)[:, None]
            gather_segments(tuple(hosts[turn]), buffer, exchange.pack)
            arrived = came[turn].transpose(0, 1)[:, None]
            for packed, segments in zip((rows, blocks), exchange.unpack, strict=True):
                copy_segments(arrived, packed, segments)

        def as_int8(i: int, hosts: list[torch.Tensor] = hosts) -> None:
            buffer, arrived = (one.transpose(0, 1)[:, None] for one in written)
            wire.write(tuple(hosts[i % setting.sets]), buffer, exchange.pack, (None, mean, None))
            for packed, segments in zip(written_packed, exchange.unpack, strict=True):
                copy_segments(arrived, packed, segments)
                wire.read(packed, rows)

        def copies(i: int) -> None:
            twins[0].copy_(sent[i % setting.sets])
            twins[1].copy_(came[i % setting.sets])

        ms = sampler.medians({"ours": ours, "copies": copies, "int8": as_int8})
        yield Row(f"pack + unpack of {strides} / device copies", ms["ours"] / ms["copies"], "", "≤ 1.3")
        yield Row(f"int8: pack + unpack + read of {strides} / as it is", ms["int8"] / ms["ours"], "")
        moved = 2 * (sent[0].nbytes + came[0].nbytes)
        yield Row(f"device copies beside {strides}", moved / ms["copies"] / 1e9, "TB/s")


def against_sparge(setting: Setting, sampler: Sampler) -> Iterator[Row]:
    """SpargeAttn's kernel on the same masks, and our predicted masks beside its own, where it is installed."""
    from dbsp_kernels import DenseHeadLayout
    from dbsp_kernels.backends import sparge
    from dbsp_kernels.triton.forward import capability_of

    if sparge.why_unavailable() is not None:
        return
    ((block_q, block_k),) = sparge.blocks(capability_of(torch.device("cuda")))
    layout = DenseHeadLayout(setting.heads, setting.tokens)
    for density in setting.densities:
        job = setting.job(block_q, block_k, density)

        def theirs(i: int, job: GenerateJob = job) -> object:
            inputs = job.inputs[i % setting.sets]
            return block_attention(*inputs, **vars(job.table), kernel="sparge", head_layout=layout, lse=False)

        def ours(i: int, job: GenerateJob = job) -> object:
            return block_attention(*job.inputs[i % setting.sets], **vars(job.table), kernel="triton")

        ms = sampler.medians({"ours": ours, "theirs": theirs})
        yield Row(f"{job.name}: time / SpargeAttn (8 bits)", ms["ours"] / ms["theirs"], "")
    yield _mask_agreement(setting, block_q, block_k)


def _mask_agreement(setting: Setting, block_q: int, block_k: int) -> Row:
    from spas_sage_attn.utils import get_block_map_meansim

    from dbsp_core.sources.base import LocalQK, MaskRequest
    from dbsp_core.sources.sparge import SpargeSource

    shape = (1, setting.heads, setting.tokens, setting.width)
    q, k = (torch.randn(shape, device=setting.device, dtype=setting.dtype).cumsum(2) / 30 for _ in range(2))
    theirs = get_block_map_meansim(q, k, simthreshd1=0.3, cdfthreshd=0.92, return_lut=False)[0].bool()
    source = SpargeSource(block_q=block_q, block_k=block_k, similarity=0.3, cdf=0.92)
    ours = source.mask(MaskRequest(0, setting.heads, setting.thw), LocalQK.alone(q, k)).bits
    return Row("blocks on which our masks and SpargeAttn's agree", float((ours == theirs).float().mean()), "")
