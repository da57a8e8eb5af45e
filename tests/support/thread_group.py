"""A group whose ranks are threads of this process, behind `SequenceGroup`'s methods.

Ranks meet in memory: every call has a number within its group, and leaves a copy of what it sends. What is received
asynchronously is not there before `wait`. Where gloo would hang, or pair what does not belong together, this breaks
off: after a call of another kind or shape than the other ranks' of the same number, where a rank has gone, and where a
sender changes what is in flight.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from dbsp_core.comm.groups import PendingTransfer, SequenceGroup, explain_broken_connection


@dataclass
class Meeting:
    """The state that the ranks of one group share: the calls that each has made and the others have not yet read."""

    size: int
    patience_s: float
    first: int = 0
    """Of a part of another meeting's ranks: the number that its rank 0 has there."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    waiting: dict[threading.Condition, Callable[[], bool]] = field(default_factory=dict)
    """Of each thread that waits: what wakes it, and whether there is what it waits for."""
    kinds: list[tuple[int, str]] = field(default_factory=list)
    """By number of the call: the first rank that made it, and what it called."""
    made: list[int] = field(init=False)
    parcels: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)
    """By sender, receiver and number of the call."""
    gone: dict[int, str] = field(default_factory=dict)
    """By rank that makes no more calls: why."""
    broken: str = ""
    auxiliary: dict[str, Meeting] = field(default_factory=dict)
    making: threading.RLock = field(default_factory=threading.RLock)
    together: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """What ranks make once for all, and how many of them have not taken it."""

    def __post_init__(self) -> None:
        self.made = [0] * self.size

    def post(self, rank: int, kind: str, parcels: dict[int, torch.Tensor]) -> int:
        """Makes a rank's next call, with parcels by receiver. Returns its number."""
        with self.lock:
            self._raise_if_broken()
            number = self.made[rank]
            if number == len(self.kinds):
                self.kinds.append((rank, kind))
            first, expected = self.kinds[number]
            if kind != expected:
                self.broken = f"call {number}: rank {rank} makes {kind}, rank {first} makes {expected}"
            self.made[rank] += 1
            self.parcels |= {(rank, to, number): parcel for to, parcel in parcels.items()}
            self._wake()
            self._raise_if_broken()
        return number

    def read(self, rank: int, number: int, sources: Sequence[int]) -> list[torch.Tensor]:
        """Returns the parcels of a call for `rank`, by source, once all of them are there."""
        wanted = [(source, rank, number) for source in sources]

        def late() -> list[int]:
            return [source for source in sources if self.made[source] <= number]

        def missing() -> bool:
            return any(key not in self.parcels for key in wanted)

        def decided() -> bool:
            return not missing() or bool(self.broken) or not late() or any(map(self.gone.get, late()))

        if not decided():
            with self.lock:
                woken = threading.Condition(self.lock)
                self.waiting[woken] = decided
                woken.wait_for(decided, self.patience_s)
                del self.waiting[woken]
        with self.lock:
            if missing():
                self._raise_if_broken()
                said = [self.gone.get(source, f"rank {source} has not come") for source in late()]
                self.broken = "; ".join(said) or f"call {number}: nothing was sent to rank {rank}"
                self._wake()
                self._raise_if_broken()
            return [self.parcels.pop(key) for key in wanted]

    def leave(self, rank: int, why: str) -> None:
        """Notes that a rank makes no more calls, in auxiliary groups, too."""
        with self.lock:
            self.gone[rank] = why
            self._wake()
            for meeting in self.auxiliary.values():
                meeting.leave_from_outside(rank, why)

    def leave_from_outside(self, rank: int, why: str) -> None:
        """Notes that a rank has left, by its number in the meeting that this one is made from."""
        if 0 <= rank - self.first < self.size:
            self.leave(rank - self.first, why)

    def alongside(self, purpose: str, ranks: range | None = None) -> Meeting:
        """Returns the meeting of the auxiliary group for a purpose, of all ranks or of some."""
        with self.lock:
            if purpose not in self.auxiliary:
                ranks = range(self.size) if ranks is None else ranks
                self.auxiliary[purpose] = Meeting(len(ranks), self.patience_s, ranks.start)
                for rank, why in self.gone.items():
                    self.auxiliary[purpose].leave_from_outside(rank, why)
            return self.auxiliary[purpose]

    def _wake(self) -> None:
        """Wakes those whose wait is over, and nobody else: waking all takes longer than what they compute."""
        for woken, over in self.waiting.items():
            if over():
                woken.notify()

    def _raise_if_broken(self) -> None:
        if self.broken:
            raise RuntimeError(self.broken)


@dataclass(eq=False)
class Member:
    """One rank of a meeting, which represents its process group.

    Attributes:
        over_gloo: True for an auxiliary group, which is one of gloo's for any group's own backend.
    """

    rank: int
    meeting: Meeting
    over_gloo: bool = False
    auxiliary: dict[str, Member] = field(default_factory=dict)
    taken: int = 0

    def take(self, make: Callable[[], Any]) -> Any:
        """Returns what the first rank that comes makes, and the others take in the same order."""
        with self.meeting.making:
            number, self.taken = self.taken, self.taken + 1
            if number not in self.meeting.together:
                self.meeting.together[number] = make(), self.meeting.size
            made, waiting = self.meeting.together.pop(number)
            if waiting > 1:
                self.meeting.together[number] = made, waiting - 1
        return made

    def group(self) -> ThreadGroup:
        return ThreadGroup(self.rank, self.meeting.size, weakref.ref(self))  # type: ignore[arg-type]


@dataclass(eq=False)
class Transfer:
    """A transfer in flight, in target of `dist.Work`: `wait` fills `received` from its `sources` one after another."""

    member: Member
    number: int
    received: torch.Tensor
    lengths: Sequence[int]
    sources: Sequence[int]
    sent: torch.Tensor
    copy: torch.Tensor
    done: bool = False

    def wait(self) -> None:
        if self.done:
            return
        if not torch.equal(_bytes(self.sent), _bytes(self.copy)):
            raise RuntimeError("what a rank sends was changed before it waited")
        parcels = self.member.meeting.read(self.member.rank, self.number, self.sources)
        for target, parcel in zip(self.received.split(list(self.lengths)), parcels, strict=True):
            if target.shape != parcel.shape:
                raise RuntimeError(f"{tuple(parcel.shape)} was sent where {tuple(target.shape)} is received")
            target.copy_(parcel)
        self.done = True


class ThreadGroup(SequenceGroup):
    """`SequenceGroup` over threads. Its `group` is a `Member`, and is gone when the ranks' run is over."""

    @property
    def _member(self) -> Member:
        member: Any = self.group
        return member

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._member.meeting.patience_s)

    @property
    def over_nccl(self) -> bool:
        return False

    def auxiliary(self, purpose: str) -> ThreadGroup:
        return self._made(purpose, range(self.size), over_gloo=True)

    def part(self, first: int, size: int) -> SequenceGroup:
        if size == self.size:
            return self
        if size == 1:
            return SequenceGroup(0, 1)
        ranks = range(first, first + size)
        return self._made(f"ranks {ranks.start} to {ranks.stop - 1}", ranks, self._member.over_gloo)

    def _made(self, purpose: str, ranks: range, over_gloo: bool) -> ThreadGroup:
        """Returns the group of some ranks, this one among them, which come together when it is made."""
        known = self._member.auxiliary
        if purpose not in known:
            meeting = self._member.meeting.alongside(purpose, ranks)
            made = Member(self.rank - ranks.start, meeting, over_gloo)
            made.group()._gather("barrier", torch.zeros(1))
            known[purpose] = made
        return known[purpose].group()

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        if self.size == 1:
            return super().start_all_to_all(sent, receive_splits, send_splits)
        received = _rubbish(sent, (sum(receive_splits), *sent.shape[1:]))
        kind = f"all-to-all of {tuple(sent.shape[1:])} {sent.dtype}"
        everyone = range(self.size)
        return self._start(kind, sent, send_splits, everyone, received, receive_splits, everyone)

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [mine]
        return [one.clone() for one in self._gather(f"all-gather of {tuple(mine.shape)}", mine.contiguous())]

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return mine
        return torch.cat(self._gather(f"all-gather along dim 0 of {tuple(mine.shape)}", _contiguous(mine)))

    def broadcast(self, values: torch.Tensor) -> None:
        if self.size > 1:
            values.copy_(self._gather(f"broadcast of {tuple(values.shape)}", values)[0])

    def barrier(self) -> None:
        with explain_broken_connection():
            self._gather("barrier", torch.zeros(1))

    def _start(
        self,
        kind: str,
        sent: torch.Tensor,
        send_splits: Sequence[int],
        receivers: Sequence[int],
        received: torch.Tensor,
        receive_splits: Sequence[int],
        sources: Sequence[int],
    ) -> PendingTransfer:
        copy = _contiguous(sent).detach().clone()
        parcels = dict(zip(receivers, copy.split(list(send_splits)), strict=True))
        with explain_broken_connection():
            number = self._member.meeting.post(self.rank, kind, parcels)
        work: Any = Transfer(self._member, number, received, receive_splits, sources, sent.detach(), copy)
        return PendingTransfer(received, sent, (work,))

    def _gather(self, kind: str, mine: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, shared by all of them."""
        copy, meeting = mine.detach().clone(), self._member.meeting
        with explain_broken_connection():
            number = meeting.post(self.rank, f"{kind} {mine.dtype}", dict.fromkeys(range(self.size), copy))
            return meeting.read(self.rank, number, range(self.size))


def _rubbish(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    if like.dtype.is_floating_point or like.dtype.is_complex:
        return like.new_full(tuple(shape), float("nan"))
    return like.new_full(tuple(shape), True if like.dtype == torch.bool else torch.iinfo(like.dtype).max)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise ValueError("process groups send contiguous tensors")
    return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
