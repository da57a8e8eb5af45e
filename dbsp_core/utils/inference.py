"""Makes tensors that outlive a call usable in later training, also if the call runs under torch.inference_mode()."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_inference"]

P = ParamSpec("P")
Result = TypeVar("Result")


def outside_inference(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorates a function that keeps tensors: under inference mode it runs without gradients instead.

    Autograd refuses inference tensors for as long as they live, and routes, tables and index tensors are kept for
    every later pass of a size.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
