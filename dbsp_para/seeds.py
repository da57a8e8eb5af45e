"""The same noise on every rank, also for a pipeline called without a generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment
from dbsp_core.pipe_calls import around_calls

__all__ = ["share_seeds"]


def share_seeds(pipe: Any, group: SequenceGroup, attachment: Attachment) -> None:
    """Gives calls without `generator` one that all ranks of `group` seed alike, with their first rank's draw."""

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_generator(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is None:
                drawn = int(torch.randint(0, 2**62, (1,)))
                seed = group.gather_integers([drawn], pipe.device)[0][0]
                generator = torch.Generator(pipe.device).manual_seed(seed)
            return call(*args, generator=generator, **kwargs)

        return with_generator

    around_calls(pipe, around, attachment)
