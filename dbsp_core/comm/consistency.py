"""Errors that all ranks raise together, because a rank that raised alone would leave the others waiting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.autograd.forward_ad import unpack_dual

from dbsp_core.comm.groups import CommunicationError, SequenceGroup
from dbsp_core.utils.errors import UserError

Result = TypeVar("Result")

_ROW = 32
"""Minimum integers per comparison, so that ranks in different comparisons still receive a row and raise."""

DEBUG_DIFFERS = "debug differs on rank(s) {}; set it on all ranks or on none"
"""Error message for `agree`: ranks with debug compare more often than ranks without."""


def attempt(function: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """Calls a function and returns (result, None) or (None, error); pass the error to `agree`."""
    try:
        return function(), None
    except Exception as error:  # any error: the other ranks would wait
        return None, error


def run_consistently(
    group: SequenceGroup,
    function: Callable[[], Result],
    fingerprint: Callable[[Result], int] = lambda _: 0,
    what: str = "the result",
) -> Result:
    """Calls a function on every rank; raises on all ranks if any rank raises or the results differ. Collective.

    `fingerprint` maps a result to a number below 2^63, equal for equal results; `what` names the result in the
    message. Errors are those of `agree`.
    """

    def compute() -> tuple[Result, int]:
        result = function()
        return result, fingerprint(result)

    computed, problem = attempt(compute)
    result, number = computed or (None, 0)
    agree(group, {f"{what} differs on rank(s) {{}}; it must be the same on every rank": number}, problem=problem)
    return cast(Result, result)  # there is one, or `agree` has raised


def agree(
    group: SequenceGroup,
    fingerprints: Mapping[str, int] | None = None,
    *,
    problem: Exception | None = None,
    numbers: Sequence[int] = (),
) -> list[tuple[int, ...]]:
    """Raises on all ranks if any rank has a problem or a fingerprint that differs from most ranks'. Collective.

    Args:
        fingerprints: Maps an error message, with {} for the differing ranks, to this rank's fingerprint (below 2^63).
        problem: Error found on this rank, if any.
        numbers: Further integers to exchange, which may differ by rank (their count may not); returned by rank.

    Raises:
        UserError: Fingerprints differ, or the first rank with a problem has a UserError.
        ValueError: The first rank with a problem has another error.
    """
    fingerprints = fingerprints or {}
    with outside_transforms():
        # 1. Gather every rank's row: [kind of problem, *numbers, *fingerprints]
        kind = _FINE if problem is None else _USERS if isinstance(problem, UserError) else _OURS
        rows = [[kind, *numbers, *fingerprints.values()]]
        if not group.alone:  # tests examine one rank of several without a process group
            rows = group.gather_integers(rows[0] + [0] * (_ROW - len(rows[0])))
        # 2. Raise the problem of the first rank that has one
        failed = [rank for rank, (kind, *_) in enumerate(rows) if kind != _FINE]
        if failed:
            texts = [_in_words(problem)] if group.alone else gather_texts(group, _in_words(problem))
            where = "" if len(failed) == len(rows) else f"rank(s) {failed}: "
            raised = UserError if rows[failed[0]][0] == _USERS else ValueError
            # user errors are shown without the original traceback
            cause = None if isinstance(problem, UserError) else problem
            raise _on_all(raised(where + texts[failed[0]])) from cause
        # 3. Compare fingerprints with the most frequent one
        for column, message in enumerate(fingerprints, 1 + len(numbers)):
            of_ranks = [row[column] for row in rows]
            usual = max(of_ranks, key=of_ranks.count)
            differing = [rank for rank, value in enumerate(of_ranks) if value != usual]
            if differing:
                raise _on_all(UserError(message.format(differing)))
        return [tuple(row[1 : 1 + len(numbers)]) for row in rows]


def _on_all(error: Exception) -> Exception:
    """Marks an error as raised on all ranks."""
    vars(error)[_RAISED_ON_ALL] = True
    return error


_RAISED_ON_ALL = "_dbsp_raised_on_all_ranks"


@contextmanager
def raised_on_all(group: SequenceGroup) -> Iterator[SequenceGroup]:
    """Raises an error of one rank in the body on all ranks, at their next exchange. Collective at its end.

    For work that may fail on one rank between exchanges, such as the first attention. Yields the group, whose ranks
    check for errors before each exchange; a failed rank skips ahead to that check.
    """
    if group.alone or group.size == 1:
        yield group
        return
    meeting = MeetingGroup(group)
    try:
        yield cast(SequenceGroup, meeting)
    except Exception as error:
        if not (vars(error).get(_RAISED_ON_ALL) or isinstance(error, CommunicationError)):
            agree(group.control(), problem=error)
        raise
    meeting.meet()


_EXCHANGES = ("all_to_all", "start_all_to_all", "all_gather", "all_gather_along", "broadcast")


class MeetingGroup:
    """A `SequenceGroup` (`within`) whose ranks compare errors before each exchange; if one failed, all raise."""

    def __init__(self, group: SequenceGroup) -> None:
        self.within = group

    def __getattr__(self, name: str) -> Any:
        within = getattr(self.within, name)
        if name not in _EXCHANGES:
            return within

        def meet_first(*arguments: Any) -> Any:
            self.meet()
            return within(*arguments)

        return meet_first

    def meet(self) -> None:
        """Raises if any rank has failed. Collective."""
        agree(self.within.control())

    def for_host_tensors(self) -> SequenceGroup:
        """Returns the group in which ranks meet, so that a failed rank is heard in any comparison."""
        return self.within.control()

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        return self.within.control().gather_integers(values)


_FINE, _USERS, _OURS = range(3)


def _in_words(problem: Exception | None) -> str:
    if problem is None:
        return ""
    plain = isinstance(problem, (ValueError, RuntimeError))
    return str(problem) if plain else f"{type(problem).__name__}: {problem}"


def gather_texts(group: SequenceGroup, text: str) -> list[str]:
    """Returns every rank's text, by rank. Collective."""
    mine = text.encode()
    length = max(1, *(size for (size,) in group.gather_integers([len(mine)])))
    padded = torch.frombuffer(bytearray(mine.ljust(length)), dtype=torch.uint8)
    texts = group.for_host_tensors().all_gather(padded)
    return [bytes(text.tolist()).decode(errors="replace").rstrip() for text in texts]


INFERENCE_TENSORS = (
    "q, k or v was made under torch.inference_mode(), so that gradients cannot flow through it; make it under "
    "torch.no_grad(), or call attention under torch.inference_mode() too"
)


def needs_gradients(*tensors: torch.Tensor) -> bool:
    """Returns True if autograd records computations on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def problem_of_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads: int,
    tokens: int,
    why: str,
    no_gradients: str | None = None,
) -> str | None:
    """Returns what is wrong with this rank's inputs, or None.

    q, k and v must be [B, `heads`, `tokens`, D]; `why` states in the message where these sizes come from, and
    `no_gradients` why gradients are not supported (None: they are).
    """
    lost = unfollowed(q, k, v)
    if lost is not None:
        return lost
    if not (q.ndim == 4 and q.shape == k.shape == v.shape):
        shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
        return f"q, k, v must be [batch, heads, n_local, D] of one shape, got {shapes}"
    if q.shape[1:3] != (heads, tokens):
        turned = q.shape[1:3] == (tokens, heads)
        hint = "; this looks like [batch, tokens, heads, D]: transpose(1, 2)" if turned else ""
        return f"q of shape {tuple(q.shape)} does not fit: {why}{hint}"
    if not q.dtype == k.dtype == v.dtype:
        dtypes = ", ".join(str(t.dtype).removeprefix("torch.") for t in (q, k, v))
        return f"q, k, v must share a dtype, got {dtypes}; cast them to one dtype"
    if 0 in (q.shape[0], q.shape[3]):
        return f"q, k, v of shape {tuple(q.shape)} are empty; skip this call on all ranks"
    if no_gradients is not None and needs_gradients(q, k, v):
        return no_gradients
    if needs_gradients(q, k, v) and any(t.is_inference() for t in (q, k, v)):
        return INFERENCE_TENSORS
    return None


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values of one attention."""
InputKind = tuple[torch.device, torch.dtype, int, bool]
"""Device, dtype, head size and need for gradients of q, k and v, which determine the kernel."""


def input_kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> InputKind:
    """Returns the `InputKind` of an attention."""
    return q.device, q.dtype, q.shape[-1] if q.ndim else 0, needs_gradients(q, k, v)


def must_compare(kind: InputKind, compared: set[InputKind], problem: object) -> bool:
    """Returns True if ranks must compare inputs of this kind, and adds it to the `compared` kinds.

    A problem on one rank can be shared only if the others compare too, which is at the first call.
    """
    if kind in compared or (problem is not None and compared):
        return False
    compared.add(kind)
    return True


_FORWARD_MODE = (
    "q, k or v carries a forward-mode derivative (torch.autograd.forward_ad), which attention over ranks does not "
    "follow; take gradients with backward(), or the difference of two calls in place of a tangent"
)
_TRANSFORMED = (
    "q, k or v is inside a transform of torch.func (grad, jvp, vmap), which attention over ranks does not follow; "
    "take gradients with backward() or torch.autograd.grad, and put what vmap maps over into the batch dimension"
)


def unfollowed(*tensors: torch.Tensor) -> str | None:
    """Returns the error message for tensors whose derivatives or batching attention would drop, or None."""
    for tensor in tensors:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return _TRANSFORMED
        if unpack_dual(tensor).tangent is not None:
            return _FORWARD_MODE
    return None


def outside_transforms() -> AbstractContextManager[object]:
    """Suspends the caller's torch.func transform, if any, so that ranks can exchange tensors made in the body.

    Tensors made inside the transform stay part of it.
    """
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack  # already loaded by the transform

    return temporarily_clear_interpreter_stack()


TWO_THREADS = "two threads run db-SP collectives on one process group; serialize the calls, or use a group per thread"
_LOCKS: weakref.WeakKeyDictionary[dist.ProcessGroup, threading.RLock] = weakref.WeakKeyDictionary()


class ConcurrencyGuard:
    """Rejects a second thread while one runs a db-SP call on the process group.

    Calls of one thread may nest. Backward runs in its own thread and is guarded during exchanges.
    """

    def __init__(self, group: SequenceGroup) -> None:
        process_group, lock = group.group, threading.RLock()
        self._lock = lock if process_group is None else _LOCKS.setdefault(process_group, lock)

    def __enter__(self) -> None:
        """Raises UserError if another thread is inside a call."""
        if not self._lock.acquire(blocking=False):
            raise UserError(TWO_THREADS)

    def __exit__(self, *_: object) -> None:
        self._lock.release()
