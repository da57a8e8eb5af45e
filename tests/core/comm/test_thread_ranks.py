"""Ranks that are threads exchange what processes on gloo do, bitwise, and break off where ranks do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import gather_shards
from dbsp_core.utils.errors import UserError
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import WorkerError

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


def several_in_flight(rank: int, world: int) -> list[torch.Tensor]:
    """Waits in another order than that of starting, with a collective in between, and for one transfer twice."""
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
    """Returns shards gathered along dim 1, and the gradient of this rank's."""
    mine = numbers(rank, 2, 3).requires_grad_()
    whole = gather_shards(mine, 1, SequenceGroup.from_group())
    (whole * torch.arange(whole.numel()).view(whole.shape)).sum().backward()
    assert mine.grad is not None
    return [whole.detach(), mine.grad]


def a_sender_waits_alone(rank: int, world: int) -> list[torch.Tensor]:
    """Changes what was sent once its sender has waited, and the receiver has not."""
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
    """Raises on one rank when no other rank needs it any more."""
    SequenceGroup.from_group().all_gather(torch.zeros(1))
    if rank == odd:
        raise LookupError("what this rank says")
    return rank


def one_never_comes(rank: int, world: int, odd: int, control: bool) -> None:
    group = SequenceGroup.from_group().control() if control else SequenceGroup.from_group()
    if rank != odd:
        group.all_gather(torch.zeros(1))


def other_order(rank: int, world: int, odd: int) -> None:
    """Makes two calls, in the other order on one rank."""
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


BROKE_OFF = "communication between the ranks of the sequence broke off"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "case",
    [
        all_to_alls,
        several_in_flight,
        gathers,
        auxiliary_groups,
        gradients,
        a_sender_waits_alone,
    ],
)
def test_collectives_of_threads_equal_gloo(threads, pool, world, case):
    assert same(threads(world).run(case), pool(world).run(case))


class TestAsynchronous:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_received_values_are_not_there_before_wait(self, threads, dtype):
        for ((received,),) in zip(threads(2).run(read_before_wait, dtype), strict=True):
            if dtype == torch.bool:
                assert received.all()
            elif dtype.is_floating_point:
                assert received.isnan().all()
            else:
                assert (received == torch.iinfo(dtype).max).all()

    def test_sent_tensor_changed_before_wait_raises(self, threads):
        assert raised(threads(2), changed_before_wait) == ["CommunicationError"] * 2


class TestFailures:
    @pytest.mark.parametrize("control", [False, True])
    def test_rank_that_raises_releases_the_others(self, threads, control):
        kinds = raised(threads(3), one_raises, 1, control, message="what this rank says")
        assert kinds == ["CommunicationError", "LookupError", "CommunicationError"]

    def test_rank_that_needs_no_other_goes_on(self, threads):
        with pytest.raises(WorkerError) as caught:
            threads(3).run(one_raises_after_the_others_were_answered, 1)
        assert caught.value.errors == [(1, "LookupError", "what this rank says")]

    @pytest.mark.parametrize("control", [False, True])
    def test_rank_that_never_comes_is_reported(self, control):
        kinds = raised(ThreadRanks(3, patience_s=0.5), one_never_comes, 2, control, message="rank 2 has")
        assert kinds[:2] == ["CommunicationError"] * 2

    def test_calls_in_another_order_raise(self, threads):
        kinds = raised(threads(3), other_order, 1, message="call 0: rank")
        assert kinds == ["CommunicationError"] * 3

    @pytest.mark.parametrize("what", ["shape", "dtype", "method", "splits"])
    def test_calls_of_another_kind_raise(self, threads, what):
        message = "was sent where" if what == "splits" else "call 0: rank"
        assert set(raised(threads(3), other_kind, 1, what, message=message)) == {"CommunicationError"}

    def test_call_without_a_wait_is_found(self, threads):
        assert raised(threads(2), one_starts_more, 0, message="1 calls") == ["Unequal"] * 2

    def test_group_ends_with_its_ranks(self, threads):
        for group in threads(2).run(group_after_its_ranks):
            with pytest.raises(UserError, match="is destroyed"):
                group.all_gather(torch.zeros(1))
        assert SequenceGroup.from_group() == SequenceGroup(0, 1)


def raised(ranks: ThreadRanks, case: Any, *args: Any, message: str = "") -> list[str]:
    """Returns the kinds of error by rank, of which one has this message."""
    with pytest.raises(WorkerError) as caught:
        ranks.run(case, *args)
    assert any(message in text for _, _, text in caught.value.errors), caught.value.errors
    assert all(text.startswith(BROKE_OFF) for _, kind, text in caught.value.errors if kind == "CommunicationError")
    return [kind for _, kind, _ in caught.value.errors]
