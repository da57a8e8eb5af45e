"""Rates of kernels at Wan2.1-14B's size, next to dense and other sparse kernels; other sizes; dense heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch

from dbsp_kernels import KERNELS, KernelRequirements, block_attention, fused_kernel
from scripts.checks.gpu.clock import Work
from scripts.checks.gpu.jobs import PackedJob, dense_works, runs, tile_variants
from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.setting import MOST_ERROR, Model, Setting, Shape

GOALS = {128: "≥ 0.75", 64: "≥ 0.55"}  # of the kernel's rate over the best dense one, by the queries of a block


def cases(setting: Setting) -> Iterator[Case]:
    for shape in setting.main:
        yield Case(f"14B, {shape.name}", partial(by_density, setting, shape), alone=True)
    shape, half = setting.main[0], setting.densities[:1]
    others = () if setting.simulated else ((setting.small, 2), (setting.long, 5))
    for model, heads in others:  # of U8R1: 12 / 8 heads, rounded up, and 40 / 8
        yield Case(model.name, partial(by_density, setting, shape, model, heads, half), alone=True)
    yield Case("dense heads, together and one by one", partial(dense_heads, setting), alone=True)
    yield Case("more than 2³¹ numbers", partial(beyond_int32, setting), alone=True)
    yield Case("merging", partial(merging, setting, shape), alone=True)


def by_density(
    setting: Setting,
    shape: Shape,
    model: Model | None = None,
    heads: int | None = None,
    densities: tuple[float, ...] | None = None,
) -> Iterator[Row]:
    """Measures rates of the loops, and of dense and other sparse kernels, interleaved; errors of the loops first."""
    model, densities = model or setting.large, densities or setting.densities
    heads = heads or setting.local_heads
    dense = dense_works(setting, model, heads, shape.dtype)
    dense_flops = 4.0 * heads * model.tokens**2 * shape.head_dim
    ms_per_flop = {}
    for density in densities:
        # 1. All that runs here: the loops, the first of which is in use, and other kernels.
        job = PackedJob(setting, shape, model, heads, density)
        ours = {name: job.tiled(tiles) for name, tiles in tile_variants(setting, shape).items()}
        ours = {name: work for name, work in ours.items() if runs(work)}
        if density == densities[0]:
            for name, work in ours.items():
                yield Row(f"error of {name}", job.error(work), "‖·‖", MOST_ERROR[shape.dtype])
        others = other_kernels(job)
        # 2. Their rates on active blocks.
        ms = setting.sampler.medians(dense | ours | others)
        for name in dense:
            yield Row(f"{name}, beside density {density}", dense_flops / ms[name] / 1e9, "TFLOP/s")
        for name in ours | others:
            yield Row(f"{name}, density {density}", job.flops / ms[name] / 1e9, "TFLOP/s")
        # 3. The one in use next to the best dense kernel, and next to the best of its kind.
        in_use, best = next(iter(ours)), max(dense_flops / ms[name] for name in dense)
        goal = GOALS.get(shape.block_q, "") if density == densities[0] and model is setting.large else ""
        yield Row(f"rate / best dense, density {density}", job.flops / ms[in_use] / best, goal=goal)
        yield Row(f"gain over best dense, density {density}", min(ms[name] for name in dense) / ms[in_use])
        yield Row(f"in use / fastest loop, density {density}", ms[in_use] / min(ms[name] for name in ours))
        ms_per_flop[density] = ms[in_use] / job.flops
    if {0.2, 1.0} <= ms_per_flop.keys():
        yield Row("time per block, density 0.2 / 1.0", ms_per_flop[0.2] / ms_per_flop[1.0], goal="≤ 1.05")


def other_kernels(job: PackedJob) -> dict[str, Work]:
    """Returns the other block-sparse kernels that support such rows here."""
    setting, shape = job.setting, job.shape
    needs = KernelRequirements(shape[:2], shape.head_dim, lse=False, ragged_rows=False, tokens=job.model.tokens)
    works = {}
    for name, kernel in KERNELS.items():
        if name in ("cpu", "reference", "triton") or kernel.why_unsupported(setting.device, shape.dtype, needs):
            continue
        whole = {} if kernel.returns_lse else {"head_tokens": job.model.tokens, "lse": False}
        works[name] = job.work(name, **whole)
    return {name: work for name, work in works.items() if runs(work)}


def dense_heads(setting: Setting) -> Iterator[Row]:
    """Times dense attention of a rank's heads in one call and head by head, by each of torch's kernels."""
    heads = max(2, setting.local_heads)
    together, one_by_one = (
        dense_works(setting, setting.large, heads, setting.dtype, at_once) for at_once in (heads, 1)
    )
    ms = setting.sampler.medians(together | {f"{name}, one by one": work for name, work in one_by_one.items()})
    for name in together:
        yield Row(f"{name}: one by one / together", ms[f"{name}, one by one"] / ms[name])
    job = PackedJob(setting, setting.main[0], setting.large, heads, 1.0)
    if fused_kernel(job.inputs[0][0]) is not None:
        ms = setting.sampler.medians({"fused": job.dense_rows(), "block kernel": job.work("triton")})
        yield Row("packed dense rows: fused / block kernel", ms["fused"] / ms["block kernel"])


def beyond_int32(setting: Setting) -> Iterator[Row]:
    """Checks the last rows of an attention whose tensors have more than 2³¹ numbers, each row with few blocks."""
    block, head_dim, width = (16, 16, 2) if setting.dry else (128, 128, 8)
    rows = 8 if setting.dry else 40 * 3360  # 40 heads of 430,080 tokens: 2.2e9 numbers, 4.4 GB a tensor
    if not setting.dry and torch.cuda.mem_get_info()[0] < 40 << 30:
        raise Skipped("it takes 40 GB of free memory")
    options = {"device": setting.device, "dtype": setting.dtype}
    q, k, v = (torch.randn(rows, block, head_dim, **options) for _ in range(3))
    index = torch.randint(rows, (rows, width), dtype=torch.int32, device=setting.device)
    index[-8:] = rows - 1 - torch.arange(width, dtype=torch.int32, device=setting.device)
    count = torch.full((rows,), width, dtype=torch.int32, device=setting.device)
    length = torch.full((rows,), block, dtype=torch.int32, device=setting.device)
    out, _ = block_attention(q, k, v, index, count, length, kernel="triton", kv_full=count)
    some = slice(-8, None)
    near = index[some].long().flatten()  # the blocks that these rows read, packed anew
    alone = torch.arange(len(near), dtype=torch.int32, device=setting.device).view(-1, width)
    wide = q[some].double(), k[near].double(), v[near].double()
    expected, _ = block_attention(*wide, alone, count[some], torch.full_like(near, block).int(), kernel="reference")
    yield Row("numbers in a tensor / 2³¹", math.prod(q.shape) / 2**31)
    error = (out[some].double() - expected).norm() / expected.norm()
    yield Row("error of the last rows", float(error), "‖·‖", MOST_ERROR[setting.dtype])
    yield Row("numbers that are not finite", float((~out[::97].isfinite()).sum()), "", 0.0)


def merging(setting: Setting, shape: Shape) -> Iterator[Row]:
    """Times merging into a partial result over a plain forward."""
    job = PackedJob(setting, shape, setting.large, setting.local_heads, setting.densities[0])
    running = job.work("triton", out_dtype=torch.float32)(0)
    ms = setting.sampler.medians({"plain": job.work("triton"), "merged": job.work("triton", partial=running)})
    yield Row("merged / plain", ms["merged"] / ms["plain"], goal="≤ 1.03")
