"""The same noise on every rank, also for a pipeline called without a generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment

__all__ = ["share_seeds"]


@dataclass(frozen=True)
class _Class:
    """A pipeline class whose `__call__` is wrapped, as long as any of its pipes is watched."""

    wrapper: Callable[..., Any]
    change: Attachment
    pipes: WeakKeyDictionary[Any, SequenceGroup] = field(default_factory=WeakKeyDictionary)


_classes: dict[type, _Class] = {}


def share_seeds(pipe: Any, group: SequenceGroup, attachment: Attachment) -> None:
    """Gives calls without `generator` one that all ranks of `group` seed alike, with their first rank's draw.

    Python looks `__call__` up on the class, so the class's is wrapped. Other pipes of the class pass through, and with
    the last watched one detached the class is as before, unless something else was wrapped around it meanwhile (as
    para-attn's first-block cache does): then all pass through.
    """
    cls = type(pipe)
    if cls not in _classes:
        _classes[cls] = _wrap(cls)
    watched = _classes[cls]
    watched.pipes[pipe] = group
    attachment.on_detach(lambda: _forget(pipe, cls))


def _wrap(cls: type) -> _Class:
    original: Callable[..., Any] = cls.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        group = _classes[cls].pipes.get(self) if cls in _classes else None
        if group is not None and generator is None:
            generator = _same_everywhere(self, group)
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
