"""A rank's failure in a forward pass, posted in torch.distributed's store for the ranks that wait for that rank."""

from __future__ import annotations

import json
import time
import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dbsp_core.comm.process_groups import parent_of
from dbsp_core.utils.errors import UserError

__all__ = ["FailureBoard", "PostedFailure", "board_of", "wait_for_work"]

_LOOK_EVERY = timedelta(seconds=1)
"""How long a rank waits before it looks at the board, and again before it takes a posted failure for the reason."""
_BROKEN = "broken"


@dataclass(frozen=True)
class PostedFailure(Exception):
    """The reason why a transfer will never be complete.

    Attributes:
        text: Message of the error that the failed rank raised.
        by_user: True if that was a `UserError`.
    """

    text: str
    by_user: bool


@dataclass(eq=False)
class FailureBoard:
    """The failures of the ranks that make one video together.

    A failure belongs to a forward pass: ranks that all fail in one pass, for the same reason, can go on together.

    Attributes:
        name: The same on all ranks, and of no other board.
        ranks: Global numbers of the ranks.
        passes: Number of forward passes that this rank has begun, equal on ranks that are in the same pass.
    """

    name: str
    ranks: tuple[int, ...]
    passes: int = 0
    _failed: int | None = None
    """The last pass, if this rank has failed in it."""
    _broken: PostedFailure | None = None

    @classmethod
    def for_group(cls, group: dist.ProcessGroup, number: int) -> FailureBoard:
        """Returns the board of a group, which is made at the first call.

        `number` is the same on all ranks, and of no other board.
        """
        if group not in _BOARDS:
            _BOARDS[group] = cls(f"{group.group_name}/{number}", tuple(dist.get_process_group_ranks(group)))
        return _BOARDS[group]

    def begin_pass(self, patience: timedelta | None) -> None:
        """Begins a forward pass; after a failed one, once every rank has failed in that too or waits in a later one.

        Args:
            patience: Time to wait for that; None: not at all, if other ranks' waits don't look at the board.

        Raises:
            PostedFailure: If a rank has left a transfer unfinished, so that none can be matched any more.
        """
        last, self._failed = self._failed, None
        end = time.monotonic() + (timedelta() if patience is None else patience).total_seconds()
        while last is not None and time.monotonic() < end and self._behind(last):
            time.sleep(_LOOK_EVERY.total_seconds() / 10)
        if last is not None and self._broken is None:
            self._broken = self._read(_BROKEN, 0)  # which is posted before the failure of the rank that has given up
        if self._broken is not None:
            raise self._broken
        self.passes += 1

    def met(self) -> None:
        """Notes that all ranks have come to an exchange since a pass failed."""
        self._failed = None

    def post(self, error: BaseException) -> None:
        """Posts why this rank leaves the current pass."""
        self._failed = self.passes
        self._write(dist.get_rank(), PostedFailure(str(error) or type(error).__name__, isinstance(error, UserError)))

    def post_wait(self) -> None:
        """Posts that this rank waits in the current pass."""
        self._write(f"waiting/{dist.get_rank()}", PostedFailure("", by_user=False))

    def posted(self) -> PostedFailure | None:
        """Returns the failure for which a rank is not coming to this rank's current pass, or None."""
        broken = self._read(_BROKEN, 0)
        if broken is not None:
            return broken
        for index, rank in enumerate(self.ranks):
            failure = self._read(rank, self.passes)
            if failure is not None:
                return PostedFailure(f"rank(s) [{index}]: {failure.text}", failure.by_user)
        return None

    def give_up(self, failure: PostedFailure) -> None:
        """Posts that a transfer was left unfinished."""
        self._broken = PostedFailure(failure.text, by_user=False)
        self._write(_BROKEN, self._broken)

    def _behind(self, last: int) -> bool:
        """Returns True if a rank has neither failed in a pass nor begun a later one, as far as is known."""
        return any(
            self._read(rank, last) is None and self._read(f"waiting/{rank}", last + 1) is None for rank in self.ranks
        )

    def _read(self, what: object, passes: int) -> PostedFailure | None:
        """Returns what is posted under a key, if it is of that pass or a later one."""
        store, key = distributed_c10d._get_default_store(), self._key(what)
        if not store.check([key]):
            return None
        of_pass, by_user, text = json.loads(store.get(key))
        return PostedFailure(text, by_user) if of_pass >= passes else None

    def _write(self, what: object, failure: PostedFailure) -> None:
        posted = json.dumps([self.passes, failure.by_user, failure.text])
        distributed_c10d._get_default_store().set(self._key(what), posted)

    def _key(self, what: object) -> str:
        return f"dbsp/failures/{self.name}/{what}"


_BOARDS: weakref.WeakKeyDictionary[dist.ProcessGroup, FailureBoard] = weakref.WeakKeyDictionary()


def board_of(group: dist.ProcessGroup | None) -> FailureBoard | None:
    """Returns the board at which waits in a group look: its own, or that of the group that it was made from."""
    while group is not None:
        if group in _BOARDS:
            return _BOARDS[group]
        group = parent_of(group)
    return None


def wait_for_work(work: dist.Work, board: FailureBoard) -> None:
    """Waits for a gloo collective on CPU tensors. Raises PostedFailure if another rank has left the pass."""
    failure: PostedFailure | None = None
    while not work.is_completed():
        try:
            work.wait(_LOOK_EVERY)
        except RuntimeError:
            if work.is_completed():
                break  # the collective itself has failed, which the wait below raises
            if failure is not None:
                board.give_up(failure)
                raise failure from None
            board.post_wait()
            failure = board.posted()
    work.wait()
