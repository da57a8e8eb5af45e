"""When a rank dies the others end with a clear error; and keys are passed on while kernels run."""

from __future__ import annotations

import os
import time
from contextlib import closing
from typing import Any
from unittest import mock

import pytest
import torch

import dbsp_core.runtime.chunk_attention
from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.masks.grid import Video
from tests.support.settings import session_of
from tests.support.workers import SAFETY_NET_S, WorkerPool

POLLS, POLL_S = 20_000, 0.001  # ends a hang; nothing is timed


def die_in_the_middle(rank: int, world: int, settings: dict[str, Any], strategy: str, odd: int) -> None:
    """Runs five steps, in the third of which rank `odd` ends."""
    session = session_of(settings, strategy, heads=world)
    for step in range(5):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        q = torch.randn(1, world, layout.shard, 16, generator=torch.Generator().manual_seed(step))
        if step == 2 and rank == odd:
            os._exit(1)
        session.attend(0, q, q, q)
    session.reuse  # noqa: B018  waits for what is being planned


def arrivals_during_kernels(rank: int, world: int) -> list[bool]:
    """Returns by chunk but the last whether the next arrived before the kernel returned, without a wait.

    Ring alone, every token locally: the keys of rank s are all s + 1, and chunk i comes from rank r − i.
    """
    mask = {"source": "dense", "block_q": 16, "block_k": 16}
    session = session_of({"mask": mask, "planner": "contiguous"}, f"U1R{world}", heads=2)
    layout = session.begin(Video((world, 4, 8)))
    k = torch.full((1, 2, layout.shard, 16), float(rank + 1))
    pending: list[PendingTransfer] = []
    arrived: list[bool] = []
    start = SequenceGroup.start_all_to_all

    def watched_start(group: SequenceGroup, *args: Any) -> PendingTransfer:
        pending.append(start(group, *args))
        return pending[-1]

    def waiting_kernel(q: torch.Tensor, *_: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = len(arrived)
        if chunk + 1 < world:
            expected = float((rank - chunk - 1) % world + 1)
            _, *chunks = pending  # q came first, with the keys of chunk 0
            arrived.append(len(chunks) == chunk + 1 and _comes(chunks[chunk].received, expected))
        return torch.zeros_like(q), torch.zeros(q.shape[:2])

    with (
        mock.patch.object(SequenceGroup, "start_all_to_all", watched_start),
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


MASKS = {
    "window": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16},
    "sparge": {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16},
}


@pytest.mark.parametrize(("mask", "strategy"), [("window", "U3R1"), ("sparge", "U1R3")])
def test_ranks_that_live_on_end_with_a_clear_error(mask, strategy):
    with closing(WorkerPool(3)) as workers:
        for pipe in workers._pipes:
            pipe.send((die_in_the_middle, ({"mask": MASKS[mask]}, strategy, 1), ""))
        for rank in (0, 2):
            assert workers._pipes[rank].poll(SAFETY_NET_S), "it hangs"
            fine, kind, message, _ = workers._pipes[rank].recv()
            assert (fine, kind) == (False, "CommunicationError")
            assert "another rank may have died" in message, message


def test_keys_are_sent_while_the_kernel_runs(pool):
    """Uses a kernel that returns only once the next chunk has arrived, which fails if that needs a wait."""
    assert pool(3).run(arrivals_during_kernels) == [[True, True]] * 3
