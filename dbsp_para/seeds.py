"""The same noise on every rank, also for a pipeline called without a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_diffusers.patching import Attachment, around_calls

__all__ = ["share_seeds"]

_CPU = torch.device("cpu")


def share_seeds(pipe: Any, group: SequenceGroup, attachment: Attachment) -> None:
    """Gives calls without `generator` one that all ranks of `group` seed alike, with their first rank's draw.

    The noise is what diffusers draws with that generator on the device that the pipeline computes on, which may be
    another than the one its weights wait on: under CPU offload. Collective at once.
    """
    control = group.control()

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_generator(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is None:
                drawn = int(torch.randint(0, 2**62, (1,)))
                seed = control.gather_integers([drawn], _CPU)[0][0]
                generator = torch.Generator(_device_of(pipe)).manual_seed(seed)
            return call(*args, generator=generator, **kwargs)

        return with_generator

    around_calls(pipe, around, attachment)


def _device_of(pipe: Any) -> torch.device:
    """Where a pipeline draws its noise: the device that it computes on, where it says so."""
    device: torch.device = getattr(pipe, "_execution_device", None) or pipe.device
    return device
