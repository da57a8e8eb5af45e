"""Something around every call of one pipeline, for as long as db-SP is attached to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from dbsp_core.hosts import Attachment

__all__ = ["around_calls"]

Call = Callable[..., Any]
_AROUND = "_dbsp_around_calls"
"""Attribute of a pipeline: on it, rather than in a table here, so that it goes with the pipeline."""


@dataclass(frozen=True)
class _Class:
    """A pipeline class whose `__call__` is wrapped, as long as any of its pipes has something around its calls."""

    wrapper: Call
    change: Attachment
    pipes: WeakSet[Any] = field(default_factory=WeakSet)


_classes: dict[type, _Class] = {}


def around_calls(pipe: Any, around: Callable[[Call], Call], attachment: Attachment) -> None:
    """Replaces what `pipe(...)` calls by around(it); the last one given is the outermost.

    Python looks `__call__` up on the class, so the class's is wrapped. Other pipes of the class pass through, and with
    the last wrapped one detached the class is as before, unless something else was wrapped around it meanwhile (as
    para-attn's first-block cache does): then all pass through.
    """
    cls = type(pipe)
    if cls not in _classes:
        _classes[cls] = _wrap(cls)
    _classes[cls].pipes.add(pipe)
    attachment.on_detach(lambda: _forget(pipe, cls))
    attachment.set_attribute(pipe, _AROUND, (*vars(pipe).get(_AROUND, ()), around))


def _wrap(cls: type) -> _Class:
    original: Call = cls.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function: Call = functools.partial(original, self)
        for around in vars(self).get(_AROUND, ()):
            function = around(function)
        return function(*args, **kwargs)

    change = Attachment()
    change.set_attribute(cls, "__call__", call)
    return _Class(call, change)


def _forget(pipe: Any, cls: type) -> None:
    """Once nothing is around the pipe's calls any more."""
    if cls not in _classes or vars(pipe).get(_AROUND):
        return
    wrapped = _classes[cls]
    wrapped.pipes.discard(pipe)
    if not wrapped.pipes and vars(cls).get("__call__") is wrapped.wrapper:
        wrapped.change.detach()
        del _classes[cls]
