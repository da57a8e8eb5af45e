"""Processes on GPUs of their own: sessions under every UxRy, and rates of exchanges. On the CPU over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from dbsp_core import SequenceGroup
from scripts.checks.gpu.clock import Sampler
from scripts.checks.gpu.ranks import MASKS, limits_of, on_rank, strategies_of
from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.sessions import SMALL, TINY, expected_on_one, inputs, local
from scripts.checks.gpu.setting import Setting
from tests.kernels.packed_inputs import relative_error
from tests.support.ports import free_port

POLL_S = 0.05


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("sessions and exchanges", partial(together, setting), limit_s=220, alone=True)


def together(setting: Setting) -> Iterator[Row]:
    """Runs all jobs on every rank, in processes, and yields rank 0's rows as they come."""
    world = 2 if setting.dry else torch.cuda.device_count()
    if setting.simulated or world < 2:
        raise Skipped("one process" if setting.simulated else "one GPU: nothing to exchange")
    rows = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, (world, free_port(), setting, rows), nprocs=world, join=False)
    ended = False
    while not ended:
        ended = ranks.join(POLL_S)  # raises what a rank has raised
        while not rows.empty():
            yield rows.get()


def _rank(rank: int, world: int, port: int, setting: Setting, rows: Any) -> None:
    options: dict[str, Any] = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": timedelta(seconds=90)}
    if setting.device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if setting.device == "cpu" else "nccl", rank=rank, world_size=world, **options)
    torch.set_num_threads(1)
    jobs: tuple[Callable[[int, int, Setting], Iterator[Row]], ...] = (sessions, exchanges)
    for row in itertools.chain.from_iterable(job(rank, world, setting) for job in jobs):
        if rank == 0:
            rows.put(row)
    dist.barrier()
    dist.destroy_process_group()


def sessions(rank: int, world: int, setting: Setting) -> Iterator[Row]:
    """Compares forward and backward of one attention under every strategy, the largest error of any rank."""
    sizes, dtype = (TINY, torch.float32) if setting.dry else (SMALL, torch.bfloat16)
    for kind, mask in MASKS.items():
        *qkv, dout = inputs(setting.device, sizes, dtype)
        right = expected_on_one(sizes, mask, qkv, dout)
        for strategy in strategies_of(world):
            layout, mine = on_rank(rank, world, setting, sizes, strategy, mask, qkv, dout)
            for (name, limit), shard, full in zip(limits_of(dtype).items(), mine, right, strict=True):
                error = _largest(setting, relative_error(shard, local(full, layout, rank)))
                yield Row(f"{strategy}, {kind}: error of {name}", error, "‖·‖", 2 * limit)


def exchanges(rank: int, world: int, setting: Setting) -> Iterator[Row]:
    """Measures bytes a second that a rank sends in an all-to-all, alone and beside a matrix product."""
    group, sampler = SequenceGroup.from_group(), Sampler(setting.device, setting.samples)
    side = 64 if setting.dry else 8192
    left = torch.randn(side, side, device=setting.device, dtype=setting.dtype)
    for megabytes in (1,) if setting.dry else (1, 16, 128, 512):
        sent = torch.zeros(megabytes << 19, 1, device=setting.device, dtype=torch.bfloat16)
        splits = [len(sent) // world + (r < len(sent) % world) for r in range(world)]

        def exchange(i: int, sent: torch.Tensor = sent, splits: list[int] = splits) -> None:
            group.start_all_to_all(sent, [splits[rank]] * world, splits).wait()

        def beside(i: int, sent: torch.Tensor = sent, splits: list[int] = splits) -> None:
            pending = group.start_all_to_all(sent, [splits[rank]] * world, splits)
            torch.mm(left, left)
            pending.wait()

        ms = sampler.medians({"exchange": exchange, "product": lambda i: torch.mm(left, left), "both": beside})
        ms = {name: _largest(setting, value) for name, value in ms.items()}
        sent_bytes = sent.nbytes * (world - 1) / world
        yield Row(f"all-to-all, {megabytes} MB a rank", sent_bytes / ms["exchange"] / 1e6, "GB/s")
        yield Row(f"{megabytes} MB beside a product / longer of both", ms["both"] / max(ms["exchange"], ms["product"]))


def _largest(setting: Setting, value: float) -> float:
    """Returns the largest of all ranks."""
    largest = torch.tensor(value, device=setting.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
