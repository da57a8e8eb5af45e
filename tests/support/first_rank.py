"""References that one rank of a pool computes for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tests.support.shared import shared

Result = TypeVar("Result")


def by_first_rank(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that all ranks call together, whose results are the first rank's, kept, and must not be changed."""

    def once(*args: Any) -> Result:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return function(*args)
        sent: list[Any] = [None, None]
        if dist.get_rank() == 0:
            try:
                sent[0] = function(*args)
            except Exception as error:  # of which the others must not wait for the end
                sent[1] = error
        dist.broadcast_object_list(sent)
        if sent[1] is not None:
            raise sent[1]
        return sent[0]

    return shared(once)
