"""What one process makes, worked out on one rank and kept: all ranks and strategies are compared with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests.support.models.transformers_for_tests import make_transformer
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

Result = TypeVar("Result")
_kept: dict[str, Any] = {}


def kept_from_rank_0(key: object, make: Callable[[], Any]) -> Any:
    """Returns what make() gives on rank 0, on every rank; worked out once for a key, distinguished by its repr.

    All ranks must ask, in the same order, and none may write into the result. What make() raises is raised on all.
    """
    name = repr(key)
    if name not in _kept:
        _kept[name] = _from_rank_0(make)
    return _kept[name]


def by_first_rank(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function that all ranks call together, whose results are rank 0's, kept, and must not be changed."""
    return shared(lambda *args: _from_rank_0(functools.partial(function, *args)))


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


def pass_alone(model: str, inputs: dict[str, Any], config: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward pass of a tiny transformer: (of dense attention, with the masks of a configuration)."""
    transformer = make_transformer(model)
    with torch.no_grad():
        dense = transformer(**inputs)[0]
        attach_single_process(transformer, config)
        return dense, transformer(**inputs)[0]


def mask_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What of a configuration is the same for any ranks, the strategy and the layout."""
    return {name: value for name, value in config.items() if name != "strategy"}
