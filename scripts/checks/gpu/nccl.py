"""Step 7: processes on GPUs of their own, over NCCL: rates of exchanges, sessions, a video. On the CPU over gloo."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dbsp_core import SequenceGroup
from scripts.checks.gpu.journal import Case, Row, Skipped
from scripts.checks.gpu.ranks import MASKS, inputs, limits_of, on_rank, strategies_of
from scripts.checks.gpu.sessions import SMALL, TINY, expected_on_one, local
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.video import PLANNERS, denoise, transformer_of
from tests.kernels.packed_inputs import relative_error
from tests.support.ports import free_port

POLL_S = 0.05
LIMIT_S = 220.0


def cases(setting: Setting) -> Iterator[Case]:
    # A dry run starts processes once.
    for names in (tuple(JOBS),) if setting.dry else ((name,) for name in JOBS):
        yield Case(", ".join(names), partial(together, setting, names), LIMIT_S)


def together(setting: Setting, names: tuple[str, ...]) -> Iterator[Row]:
    """Runs jobs on every rank, in processes, and yields rank 0's rows as they come."""
    world = 2 if setting.dry else torch.cuda.device_count()
    if world < 2:
        raise Skipped("one GPU: nothing to exchange")
    if setting.simulated:
        raise Skipped("simulated GPUs are those of one process")
    found = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, (world, free_port(), setting, names, found), nprocs=world, join=False)
    ended = False
    while not ended:
        ended = ranks.join(POLL_S)  # raises what a rank has raised
        while not found.empty():
            yield found.get()


def _rank(rank: int, world: int, port: int, setting: Setting, names: tuple[str, ...], found: Any) -> None:
    options: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=90)}
    if setting.device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if setting.device == "cpu" else "nccl", rank=rank, world_size=world, **options)
    torch.set_num_threads(1)
    for name in names:
        for row in JOBS[name](rank, world, setting, strategies_of(world)):
            if rank == 0:
                found.put(row)
    dist.barrier()
    dist.destroy_process_group()


def exchange(rank: int, world: int, setting: Setting, strategies: list[str]) -> Iterator[Row]:
    """Bytes a second that a rank sends in an all-to-all."""
    group = SequenceGroup.from_group()
    for megabytes in (1,) if setting.dry else (1, 16, 128, 512):
        sent = torch.zeros(megabytes << 19, 1, device=setting.device, dtype=torch.bfloat16)
        even = [len(sent) // world + (r < len(sent) % world) for r in range(world)]
        came = [even[rank]] * world
        seconds = _seconds(setting, lambda s=sent, c=came, e=even: group.start_all_to_all(s, c, e).wait())
        rate = sent.nbytes * (world - 1) / world / seconds / 1e9
        yield Row(f"all-to-all, {megabytes} MB a rank", rate, "GB/s")


def sessions(rank: int, world: int, setting: Setting, strategies: list[str]) -> Iterator[Row]:
    """Compares forward and backward of one attention under every strategy, the largest error of any rank."""
    sizes = TINY if setting.dry else SMALL
    dtypes = (torch.float32,) if setting.dry else (torch.float32, torch.bfloat16)
    for dtype, (kind, mask) in itertools.product(dtypes, MASKS.items()):
        *qkv, dout = inputs(setting, sizes, dtype)
        right = expected_on_one(sizes, mask, qkv, dout)
        for strategy in strategies:
            layout, mine = on_rank(rank, world, setting, sizes, strategy, mask, qkv, dout)
            for (name, limit), one, other in zip(limits_of(dtype).items(), mine, right, strict=True):
                error = _largest(setting, relative_error(one, local(other, layout, rank)))
                yield Row(f"{strategy}, {kind}, {str(dtype)[6:]}: error of {name}", error, "‖·‖", 2 * limit)


def video(rank: int, world: int, setting: Setting, strategies: list[str]) -> Iterator[Row]:
    """Times a denoising on all ranks, balanced against unbalanced: of the slowest rank."""
    model = transformer_of(setting)
    for strategy in strategies:
        steps = {}
        for planner in PLANNERS:
            attentions, total = denoise(setting, model, SequenceGroup.from_group(), strategy, planner)
            steps[planner] = _largest(setting, total) / setting.steps
            attention = _largest(setting, sum(attentions)) / setting.steps
            yield Row(f"{strategy}, {planner}: a step", steps[planner], "ms")
            yield Row(f"{strategy}, {planner}: attention in a step", attention, "ms")
        unbalanced, balanced = PLANNERS
        yield Row(f"{strategy}: step, unbalanced / balanced", steps[unbalanced] / steps[balanced], goal="≥ 1.02")


def _largest(setting: Setting, value: float) -> float:
    """Returns the largest of all ranks."""
    found = torch.tensor(value, device=setting.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _seconds(setting: Setting, work: Callable[[], object], times: int = 10) -> float:
    """Measures the mean seconds of a work that all ranks do, after two to warm up."""
    for _warm_up in range(2):
        work()
    _largest(setting, 0.0)
    start = time.perf_counter()
    for _sample in range(times):
        work()
    _largest(setting, 0.0)
    return (time.perf_counter() - start) / times


JOBS = {"exchange": exchange, "sessions": sessions, "video": video}
"""Functions of (rank, world, setting, strategies) that yield rows, of which rank 0's count."""
