"""What happens at each call of a parallelized pipeline: the same noise on every rank, and a generation of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment

__all__ = ["watch_calls"]


@dataclass(frozen=True)
class _Watched:
    group: SequenceGroup
    restart: Callable[[], None]


@dataclass(frozen=True)
class _Class:
    """A pipeline class whose `__call__` is wrapped, as long as any of its pipes is watched."""

    wrapper: Callable[..., Any]
    change: Attachment
    pipes: WeakKeyDictionary[Any, _Watched] = field(default_factory=WeakKeyDictionary)


_classes: dict[type, _Class] = {}


def watch_calls(pipe: Any, group: SequenceGroup, restart: Callable[[], None], attachment: Attachment) -> None:
    """Calls `restart` before each generation, and gives those without `generator` one that all ranks of `group` seed
    alike, with their first rank's draw.

    Python looks `__call__` up on the class, so the class's is wrapped. Other pipes of the class pass through, and with
    the last watched one detached the class is as before, unless something else was wrapped around it meanwhile (as
    para-attn's first-block cache does): then all pass through.
    """
    cls = type(pipe)
    if cls not in _classes:
        _classes[cls] = _wrap(cls)
    watched = _classes[cls]
    watched.pipes[pipe] = _Watched(group, restart)
    attachment.on_detach(lambda: _forget(pipe, cls))


def _wrap(cls: type) -> _Class:
    original: Callable[..., Any] = cls.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        known = _classes[cls].pipes.get(self) if cls in _classes else None
        if known is not None:
            known.restart()
            generator = _same_everywhere(self, known.group) if generator is None else generator
        return original(self, *args, generator=generator, **kwargs)

    change = Attachment()
    change.set_attribute(cls, "__call__", call)
    return _Class(call, change)


def _forget(pipe: Any, cls: type) -> None:
    watched = _classes[cls]
    watched.pipes.pop(pipe, None)
    if not watched.pipes and vars(cls).get("__call__") is watched.wrapper:
        watched.change.detach()
        del _classes[cls]


def _same_everywhere(pipe: Any, group: SequenceGroup) -> torch.Generator:
    drawn = int(torch.randint(0, 2**62, (1,)))
    seed = group.gather_integers([drawn], pipe.device)[0][0]
    return torch.Generator(pipe.device).manual_seed(seed)
