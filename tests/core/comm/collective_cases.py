"""What ranks run, as threads and as processes: every method of `SequenceGroup`, with results to be compared."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import gather_shards

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Other ones on each rank."""
    drawn = torch.randint(100, shape, generator=torch.Generator().manual_seed(rank))
    return (drawn % 2 == 0) if dtype == torch.bool else drawn.to(dtype)


def _splits(world: int, rank: int, seed: int) -> tuple[list[int], list[int]]:
    """(received, sent): unequal, some of them 0."""
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


def several_in_flight(rank: int, world: int) -> list[torch.Tensor]:
    """Waited for in another order than started, with a collective in between, and one twice."""
    group, pending = SequenceGroup.from_group(), []
    for seed in range(4):
        received, sent = _splits(world, rank, seed)
        pending.append(group.start_all_to_all(numbers(rank + 9 * seed, sum(sent), 2), received, sent))
    between = group.all_gather(numbers(rank, 3))
    order = [2, 0, 3, 1] if rank % 2 else [1, 3, 2, 0]
    found = {index: pending[index].wait() for index in order}
    return [*between, *(found[index] for index in range(4)), pending[0].wait()]


def gathers(rank: int, world: int) -> list[Any]:
    group, found = SequenceGroup.from_group(), []
    for dtype in DTYPES:
        mine = numbers(rank, 2, 3, dtype=dtype)
        found += [group.all_gather(mine.T), group.all_gather_along(mine)]
    found += [group.all_gather(torch.zeros(0, 2)), group.all_gather(torch.tensor(float(rank)))]
    return [*found, group.gather_integers([rank, 2**62 + rank])]


def auxiliary_groups(rank: int, world: int) -> list[Any]:
    """Calls in one do not count in another."""
    group = SequenceGroup.from_group()
    pending = group.start_all_to_all(numbers(rank, world), [1] * world, [1] * world)
    control = group.control().gather_integers([rank])
    group.auxiliary("reports").barrier()
    other = group.auxiliary("other").auxiliary("inner").all_gather(numbers(rank, 2))
    again = group.control().all_gather_along(numbers(rank, 3))
    assert group.control().timeout == group.timeout
    assert (group.alone, group.rank, group.size) == (False, rank, world)
    assert SequenceGroup.from_group(group) == SequenceGroup.from_group()
    return [control, other, again, pending.wait()]


def gradients(rank: int, world: int) -> list[torch.Tensor]:
    """Of shards that are gathered along dim 1."""
    mine = numbers(rank, 2, 3).requires_grad_()
    whole = gather_shards(mine, 1, SequenceGroup.from_group())
    (whole * torch.arange(whole.numel()).view(whole.shape)).sum().backward()
    assert mine.grad is not None
    return [whole.detach(), mine.grad]


def a_sender_waits_alone(rank: int, world: int) -> list[torch.Tensor]:
    """What was sent may change once its sender has waited, whether or not the receiver has."""
    group = SequenceGroup.from_group()
    sent = numbers(rank, world)
    pending = group.start_all_to_all(sent, [1] * world, [1] * world)
    if rank == 0:
        pending.wait()
        sent.fill_(-1)
    group.all_gather(torch.zeros(1))
    return [pending.wait()]


def read_before_wait(rank: int, world: int, dtype: torch.dtype) -> list[torch.Tensor]:
    sent = torch.ones(world, dtype=dtype)
    return [SequenceGroup.from_group().start_all_to_all(sent, [1] * world, [1] * world).received]


def changed_before_wait(rank: int, world: int) -> None:
    sent = torch.zeros(world)
    pending = SequenceGroup.from_group().start_all_to_all(sent, [1] * world, [1] * world)
    sent[rank] = 1.0
    pending.wait()


def one_raises(rank: int, world: int, odd: int, control: bool) -> None:
    group = SequenceGroup.from_group().control() if control else SequenceGroup.from_group()
    if rank == odd:
        raise LookupError("what this rank says")
    group.all_gather(torch.zeros(1))


def one_raises_after_the_others_were_answered(rank: int, world: int, odd: int) -> int:
    """The others need nothing more of it."""
    SequenceGroup.from_group().all_gather(torch.zeros(1))
    if rank == odd:
        raise LookupError("what this rank says")
    return rank


def one_never_comes(rank: int, world: int, odd: int, control: bool) -> None:
    group = SequenceGroup.from_group().control() if control else SequenceGroup.from_group()
    if rank != odd:
        group.all_gather(torch.zeros(1))


def other_order(rank: int, world: int, odd: int) -> None:
    """Two calls one after another, the other way round on one rank."""
    group = SequenceGroup.from_group()
    calls = [
        lambda: group.start_all_to_all(torch.zeros(world), [1] * world, [1] * world),
        lambda: group.start_all_to_all(torch.zeros(world, 2), [1] * world, [1] * world),
    ]
    for pending in [call() for call in (reversed(calls) if rank == odd else calls)]:
        pending.wait()


def other_kind(rank: int, world: int, odd: int, what: str) -> None:
    group = SequenceGroup.from_group()
    if what == "shape":
        group.all_gather(torch.zeros(2 if rank == odd else 1))
    if what == "dtype":
        group.all_gather(torch.zeros(1, dtype=torch.int64 if rank == odd else torch.float32))
    if what == "method":
        (group.all_gather_along if rank == odd else group.all_gather)(torch.zeros(1))
    if what == "splits":
        rows = 2 if rank == odd else 1
        group.all_to_all(torch.zeros(rows * world), [1] * world, [rows] * world)


def one_starts_more(rank: int, world: int, odd: int) -> None:
    if rank == odd:
        SequenceGroup.from_group().start_all_to_all(torch.zeros(world), [1] * world, [1] * world)


def group_after_its_ranks(rank: int, world: int) -> SequenceGroup:
    return SequenceGroup.from_group()
