"""Ranks that are threads exchange what processes on gloo do, bitwise, and break off where ranks do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbsp_core import SequenceGroup
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import SAFETY_NET_S, WorkerError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns numbers that differ from rank to rank."""
    drawn = torch.randint(100, shape, generator=torch.Generator().manual_seed(rank))
    return (drawn % 2 == 0) if dtype == torch.bool else drawn.to(dtype)


def _splits(world: int, rank: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns (received, sent), unequal and some of them 0."""
    table = torch.randint(4, (world, world), generator=torch.Generator().manual_seed(seed))
    return table[:, rank].tolist(), table[rank].tolist()


def all_to_alls(rank: int, world: int) -> list[torch.Tensor]:
    group, found = SequenceGroup.from_group(), []
    for seed, dtype in enumerate(DTYPES):
        received, sent = _splits(world, rank, seed)
        found.append(group.all_to_all(numbers(rank, sum(sent), 2, 3, dtype=dtype), received, sent))
    nothing = [0] * world
    found.append(group.all_to_all(numbers(rank, 0, 5), nothing, nothing))
    found.append(group.all_to_all(numbers(rank, world, 0), [1] * world, [1] * world))
    return found


def gathers(rank: int, world: int) -> list[Any]:
    group, found = SequenceGroup.from_group(), []
    for dtype in DTYPES:
        mine = numbers(rank, 2, 3, dtype=dtype)
        found += [group.all_gather(mine.T), group.all_gather_along(mine)]
    found += [group.all_gather(torch.zeros(0, 2)), group.all_gather(torch.tensor(float(rank)))]
    return [*found, group.gather_integers([rank, 2**62 + rank])]


def changed_before_wait(rank: int, world: int, *_: Any) -> None:
    sent = torch.zeros(world)
    pending = SequenceGroup.from_group().start_all_to_all(sent, [1] * world, [1] * world)
    assert pending.received.isnan().all()
    sent[rank] = 1.0
    pending.wait()


def ends_early(rank: int, world: int, odd: int, how: str) -> int:
    """Raises, or returns, on one rank before or after a collective of all."""
    group = SequenceGroup.from_group().control() if "control" in how else SequenceGroup.from_group()
    if rank != odd or "after" in how:
        group.all_gather(torch.zeros(1))
    if rank == odd and "raises" in how:
        raise LookupError("what this rank says")
    return rank


def calls_otherwise(rank: int, world: int, odd: int, what: str) -> None:
    """Makes another call than the others on one rank, or two calls in the other order."""
    group, ones, size = SequenceGroup.from_group(), [1] * world, 2 if rank == odd else 1
    if what == "splits":
        group.all_to_all(torch.zeros(size * world), ones, [size] * world)
    if what == "order":
        widths = (2, 1) if rank == odd else (1, 2)
        for pending in [group.start_all_to_all(torch.zeros(world, width), ones, ones) for width in widths]:
            pending.wait()
    if what == "no wait" and rank == odd:
        group.start_all_to_all(torch.zeros(world), ones, ones)


BROKE_OFF = "communication between the ranks of the sequence broke off"


@pytest.mark.parametrize("case", [all_to_alls, gathers])
def test_collectives_of_threads_equal_gloo(threads, pool, case):
    torch.testing.assert_close(threads(3).run(case), pool(3).run(case), rtol=0, atol=0)


BROKEN, RAISED, UNEQUAL = "CommunicationError", "LookupError", "Unequal"


@pytest.mark.parametrize(
    ("case", "how", "kinds", "message"),
    [
        (ends_early, "raises", {0: BROKEN, 1: RAISED, 2: BROKEN}, "what this rank says"),
        (ends_early, "returns, control", {0: BROKEN, 2: BROKEN}, "rank 1 has"),
        (calls_otherwise, "order", dict.fromkeys(range(3), BROKEN), "call 0: rank"),
        (calls_otherwise, "splits", dict.fromkeys(range(3), BROKEN), "was sent where"),
        (changed_before_wait, "", dict.fromkeys(range(3), BROKEN), "was changed before"),
        (calls_otherwise, "no wait", dict.fromkeys(range(3), UNEQUAL), "1 calls"),
    ],
)
def test_rank_that_ends_early_or_calls_otherwise_is_reported(case, how, kinds, message):
    patience_s = 0.5 if "returns" in how else SAFETY_NET_S
    assert raised(ThreadRanks(3, patience_s), case, 1, how, message=message) == kinds


def raised(ranks: ThreadRanks, case: Any, *args: Any, message: str = "") -> dict[int, str]:
    """Returns the kinds of error by rank, of which one has this message."""
    with pytest.raises(WorkerError) as caught:
        ranks.run(case, *args)
    assert any(message in text for _, _, text in caught.value.errors), caught.value.errors
    assert all(text.startswith(BROKE_OFF) for _, kind, text in caught.value.errors if kind == "CommunicationError")
    return {rank: kind for rank, kind, _ in caught.value.errors}
