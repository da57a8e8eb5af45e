"""The same noise on every rank, also for a pipeline called without a generator."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment

__all__ = ["share_seeds"]


def share_seeds(pipe: Any, group: SequenceGroup, attachment: Attachment) -> None:
    """Gives calls without `generator` one that all ranks seed alike, with rank 0's draw.

    Python looks `__call__` up on the class, so this one pipe becomes an instance of a subclass of its own class, under
    the same name; detaching gives it its class back.
    """
    original = type(pipe)

    def call(self: Any, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is None:
            drawn = int(torch.randint(0, 2**62, (1,)))
            seed = group.gather_integers([drawn], pipe.device)[0][0]
            generator = torch.Generator(pipe.device).manual_seed(seed)
        return original.__call__(self, *args, generator=generator, **kwargs)

    seeded = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
    pipe.__class__ = seeded
    attachment.on_detach(lambda: setattr(pipe, "__class__", original))
