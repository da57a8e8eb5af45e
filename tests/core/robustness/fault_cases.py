"""What the workers run: a rank that dies between attentions, and hand-overs watched from within the kernel."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dbsp_core.runtime.chunk_attention
from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession

POLLS, POLL_S = 20_000, 0.001  # ends a hang; nothing is timed


def die_in_the_middle(rank: int, world: int, settings: dict[str, Any], strategy: str, odd: int) -> None:
    """Five steps, in the third of which rank `odd` is gone."""
    config = DbspConfig.load(settings)
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy.parse(strategy), heads=world, layers=1)
    for step in range(5):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        q = torch.randn(1, world, layout.shard, 16, generator=torch.Generator().manual_seed(step))
        if step == 2 and rank == odd:
            os._exit(1)
        session.attend(0, q, q, q)
    session.reuse  # noqa: B018  waits for what is being planned


def make_a_group_that_one_rank_does_not_come_to(rank: int, world: int) -> str:
    """Returns what the others are given"""
    group = SequenceGroup.from_group(dist.new_group(timeout=timedelta(seconds=1)))
    told = ""
    try:
        if rank != 0:
            group.control()
    except RuntimeError as error:
        told = str(error)
    dist.barrier()
    return told


def arrivals_during_kernels(rank: int, world: int) -> list[bool]:
    """By chunk but the last: whether the next had arrived before the kernel returned, without being waited for.

    Ring alone, every token locally: the keys of rank s are all s + 1, and chunk i comes from rank r − i.
    """
    config = DbspConfig.load({"mask": {"source": "dense", "block_q": 16, "block_k": 16}, "planner": "contiguous"})
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy(1, world), heads=2, layers=1)
    layout = session.begin(Video((world, 4, 8)))
    k = torch.full((1, 2, layout.shard, 16), float(rank + 1))
    pending: list[PendingTransfer] = []
    arrived: list[bool] = []
    start = SequenceGroup.start_all_to_all

    def watched_start(group: SequenceGroup, *args: Any) -> PendingTransfer:
        pending.append(start(group, *args))
        return pending[-1]

    def unwatched(group: SequenceGroup, *args: Any) -> torch.Tensor:
        return start(group, *args).wait()

    def waiting_kernel(q: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = len(arrived)
        if chunk + 1 < world:
            expected = float((rank - chunk - 1) % world + 1)
            arrived.append(len(pending) == chunk + 1 and _comes(pending[chunk].received, expected))
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    with (
        mock.patch.object(SequenceGroup, "start_all_to_all", watched_start),
        mock.patch.object(SequenceGroup, "all_to_all", unwatched),
        mock.patch.object(dbsp_core.runtime.chunk_attention, "block_attention", waiting_kernel),
    ):
        session.attend(0, k, k, k)
    return arrived


def _comes(received: torch.Tensor, expected: float) -> bool:
    for _ in range(POLLS):
        if bool((received == expected).all()):
            return True
        time.sleep(POLL_S)
    return False
