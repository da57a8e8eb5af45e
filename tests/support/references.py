"""Results of one process that are computed on one rank and kept: all ranks and strategies are compared with them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def by_first_rank(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps a function that all ranks call together: rank 0's results are all ranks', kept, and must not be changed.

    Arguments are distinguished by their repr. What the function raises on rank 0 is raised on all.
    """
    kept: dict[str, Result] = {}
    lock = threading.RLock()  # ranks that are threads share the results

    @functools.wraps(function)
    def call(*args: Any) -> Result:
        key = repr(args)
        with lock:
            if key not in kept:
                kept[key] = _from_rank_0(functools.partial(function, *args))
            return kept[key]

    return call


def _from_rank_0(make: Callable[[], Any]) -> Any:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return make()
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [(make(), None)]
        except Exception as error:
            answer = [(None, error)]
    dist.broadcast_object_list(answer, src=0)
    made, error = answer[0]
    if error is not None:
        raise error
    return made
