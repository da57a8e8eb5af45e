"""Step 5: rates of kernels at shipped shapes, next to dense SDPA, FlashAttention and other kernels that import."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, make_plan
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.planning.comm_dtype import COMM_DTYPES
from dbsp_kernels import (
    KERNELS,
    DensePart,
    KernelInputs,
    KernelRequirements,
    attend_dense_part,
    block_attention,
)
from dbsp_kernels.dense import fused_kernel
from dbsp_kernels.exchange import copy_segments
from dbsp_kernels.triton.tiles import HOPPER, Tiles, tiles_for
from scripts.checks.gpu.clock import Work
from scripts.checks.gpu.journal import Case, Row
from scripts.checks.gpu.setting import MOST_ERROR, PackedJob, Setting, Shape

GOALS = {("triton", 128): "≥ 0.75", ("triton", 64): "≥ 0.55", ("fa4", 128): "≥ 0.9"}
"""Of a kernel's rate over the best dense one, by the queries of a block."""
MIDDLE = 0.4
"""The density at which variants are compared: about the paper's."""
NOT_TIMED = ("cpu", "reference")


def cases(setting: Setting) -> Iterator[Case]:
    for shape in setting.measured:
        yield Case(f"forward, {shape.name}", partial(forward, setting, shape))
    usual = setting.measured[-1]
    yield Case("dense heads", partial(dense_heads, setting, usual))
    yield Case("merging", lambda: merging(setting.job(usual, MIDDLE)))
    yield Case("packing", partial(packing, setting))
    yield Case("tiles", lambda: tiles(setting.job(usual, MIDDLE)))


def largest_error(job: PackedJob, kernel: str, rows: int = 16, **options: object) -> float:
    """Returns the relative error of the first rows of the order and the last, against float64."""
    q, k, v = job.inputs[0]
    out, _ = block_attention(q, k, v, **vars(job.table), kernel=kernel, **options)
    picked = torch.cat([job.table.row_schedule[: rows // 2], job.table.row_schedule[-(rows // 2) :]]).long()
    table = {name: getattr(job.table, name)[picked] for name in ("kv_index", "kv_count")}
    wide = (q[picked].double(), k.double(), v.double())
    expected, _ = block_attention(*wide, **table, kv_len=job.table.kv_len, kernel="reference")
    error = (out[picked].double() - expected).norm() / expected.norm()
    return float(error) if bool(out.isfinite().all()) else float("nan")


def dense_contenders(setting: Setting, shape: Shape) -> dict[str, Work]:
    """Returns dense attention of a rank's heads by every library that does it here."""
    options = {"device": setting.device, "dtype": shape.dtype}
    size = 3, 1, setting.own_heads, setting.tokens, shape.head_dim
    sets = [torch.randn(size, **options) for _ in range(setting.sets)]

    def sdpa(backend: SDPBackend) -> Work:
        def work(i: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*sets[i % len(sets)])

        return work

    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION") if setting.device != "cpu" else ("MATH",)
    works = {f"SDPA {name.partition('_')[0].lower()}": sdpa(getattr(SDPBackend, name)) for name in names}
    for module in ("flash_attn", "flash_attn_interface"):
        if importlib.util.find_spec(module) is not None:
            attend = __import__(module).flash_attn_func
            works[module] = lambda i, f=attend: f(*(t.transpose(1, 2) for t in sets[i % len(sets)]))
    return {name: work for name, work in works.items() if _runs(work)}


def sparse_contenders(job: PackedJob) -> dict[str, Work]:
    """Returns every block-sparse kernel that supports such rows here."""
    setting, shape, found = job.setting, job.shape, {}
    needs = KernelRequirements(shape[:2], shape.head_dim, lse=False, ragged_rows=False, tokens=setting.tokens)
    for name, kernel in KERNELS.items():
        if name not in NOT_TIMED and kernel.why_unsupported(setting.device, shape.dtype, needs) is None:
            whole = {} if kernel.returns_lse else {"head_tokens": setting.tokens, "lse": False}
            found[name] = job.work(name, **whole)
    return found


def forward(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Rates at each density, interleaved with dense libraries, and how far from linear in density they are."""
    per_density = {}
    dense = dense_contenders(setting, shape)
    dense_flops = 4.0 * setting.own_heads * setting.tokens**2 * shape.head_dim
    for density in setting.densities:
        job = setting.job(shape, density)
        sparse = {}
        for name, work in sparse_contenders(job).items():
            if name == "triton":
                yield Row(f"error at {density}", largest_error(job, name), "‖·‖", MOST_ERROR[shape.dtype])
            if _runs(work):
                sparse[name] = work
        ms = setting.sampler.medians(dense | sparse)
        best = max(dense_flops / ms[name] / 1e9 for name in dense)
        for name in dense:
            yield Row(f"{name} next to {density}", dense_flops / ms[name] / 1e9, "TFLOP/s")
        for name in sparse:
            rate = job.flops / ms[name] / 1e9
            yield Row(f"{name} at {density}", rate, "TFLOP/s")
            yield Row(f"{name} at {density} / best dense", rate / best, "", goal=GOALS.get((name, shape.block_q), ""))
        per_density[density] = ms["triton"] / job.flops
    if 1.0 in per_density:
        sparsest = min(per_density)
        yield Row(f"time per block at {sparsest} / at 1.0", per_density[sparsest] / per_density[1.0], goal="≤ 1.05")


def dense_heads(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Rows of dense heads by torch's own kernels, over our kernel on the same rows."""
    job = setting.job(shape, 1.0)
    if fused_kernel(job.inputs[0][0]) is None:  # as on a CPU
        return
    grid = job.mask.grid
    part = DensePart((0, grid.nq), (0, grid.nk), None if setting.tokens % grid.block_k == 0 else _real(grid, setting))

    def theirs(i: int) -> object:
        q, k, v = (t.unflatten(0, (job.mask.heads, -1)) for t in job.inputs[i % setting.sets])
        return attend_dense_part(q, k, v, part, shape.head_dim**-0.5)

    ms = setting.sampler.medians({"ours": job.work("triton"), "theirs": theirs})
    yield Row("dense rows by torch / by triton", ms["theirs"] / ms["ours"])


def merging(job: PackedJob) -> Iterator[Row]:
    """Times merging into a partial result over a plain forward."""
    partial = job.work("triton", out_dtype=torch.float32)(0)
    works = {"plain": job.work("triton"), "merged": job.work("triton", partial=partial)}
    ms = job.setting.sampler.medians(works)
    yield Row(f"merged / plain, {job.name}", ms["merged"] / ms["plain"], goal="≤ 1.03")


def packing(setting: Setting) -> Iterator[Row]:
    """Times packing and unpacking a rank's q, k, v for U{world}R1 over copies of the same bytes; and as int8."""
    grid = BlockGrid.uniform(setting.tokens, setting.measured[-1].block_k)
    plan = make_plan(BlockMask.dense(setting.heads, grid), f"U{setting.world}R1")
    layout = SequenceLayout.contiguous(setting.tokens, setting.world)
    route = build_route(plan, layout, 0, layout.shard, torch.device(setting.device))
    (exchange,) = route.dispatch_exchanges
    options = {"device": setting.device, "dtype": setting.dtype}
    heads, head_dim = setting.heads, setting.head_dim
    sent, came = (torch.zeros(sum(splits), 1, head_dim, **options) for splits in (exchange.sent, exchange.received))
    rows = torch.zeros(1, 1, route.q_slots, head_dim, **options)
    blocks = torch.zeros(1, 2, route.kv_slots, head_dim, **options)
    comm_dtype, mean = COMM_DTYPES["int8"], torch.zeros(1, heads, head_dim, device=setting.device)
    written = [comm_dtype.empty(rows, *buffer.shape[:2]).zero_() for buffer in (sent, came)]
    written_packed = [comm_dtype.empty(rows, *packed.shape[:3]).zero_() for packed in (rows, blocks)]
    qkv = tuple(torch.randn(3, layout.shard, heads, head_dim, **options).transpose(1, 2)[:, None])

    def plain(i: int) -> None:
        copy_segments(qkv, sent.transpose(0, 1)[:, None], exchange.pack)
        for packed, copies in zip((rows, blocks), exchange.unpack, strict=True):
            for segments in copies:
                copy_segments([came.transpose(0, 1)[:, None]], packed, [segments])

    def as_int8(i: int) -> None:
        buffer, arrived = (one.transpose(0, 1)[:, None] for one in written)
        comm_dtype.write(qkv, buffer, exchange.pack, (None, mean, None))
        for packed, copies in zip(written_packed, exchange.unpack, strict=True):
            for segments in copies:
                copy_segments([arrived], packed, [segments])
            comm_dtype.read(packed, rows)

    def device_copies(i: int) -> None:
        torch.empty_like(sent).copy_(sent)
        torch.empty_like(came).copy_(came)

    ms = setting.sampler.medians({"plain": plain, "copies": device_copies, "int8": as_int8})
    yield Row("pack + unpack / device copies", ms["plain"] / ms["copies"], goal="≤ 1.3")
    yield Row("the same as int8, which is also read / plain", ms["int8"] / ms["plain"])
    yield Row("device copies", 2 * (sent.nbytes + came.nbytes) / ms["copies"] / 1e9, "TB/s")


def tiles(job: PackedJob) -> Iterator[Row]:
    """Times other tiles than the table's, over the table's."""
    from dbsp_kernels.triton.forward import triton_attention
    from dbsp_kernels.triton.launch import capability_of

    setting, shape, on_gpu = job.setting, job.shape, job.setting.device != "cpu"
    capability = capability_of(torch.device(setting.device)) if on_gpu else HOPPER
    used = tiles_for(*shape, capability)
    others = [
        Tiles(used.queries, keys, warps, stages, used.loop)
        for keys in sorted({min(64, shape.block_k), shape.block_k})
        for warps in ((4, 8) if on_gpu else (8,))
        for stages in ((3, 4, 5, 6) if on_gpu else (3,))
    ]

    def run(tried: Tiles) -> Work:
        def work(i: int) -> object:
            inputs = KernelInputs(*job.inputs[i % setting.sets], **vars(job.table), scale=shape.head_dim**-0.5)
            return triton_attention(inputs, tiles=tried)

        return work

    works = {f"{t.queries}×{t.keys}, {t.warps} warps, {t.stages} stages": run(t) for t in [used, *others]}
    works = {name: work for name, work in works.items() if _runs(work)}  # others don't fit shared memory
    ms = setting.sampler.medians(works)
    first = next(iter(ms))
    for name in ms:
        yield Row(f"{name} / {first}", ms[name] / ms[first])


def _real(grid: BlockGrid, setting: Setting) -> torch.Tensor:
    """Returns int64, the positions of real tokens among a head's blocks."""
    lengths = torch.from_numpy(grid.k_axis.lengths)[:, None]
    inside = torch.arange(grid.block_k)[None] < lengths
    return inside.flatten().nonzero().squeeze(1).to(setting.device)


def _runs(work: Callable[[int], object]) -> bool:
    """Returns False if this machine, or this library, cannot do it."""
    try:
        work(0)
    except Exception as error:
        if "illegal" in str(error):  # the device has failed: nothing after it would be true
            raise
        return False
    return True
