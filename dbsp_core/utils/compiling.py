"""Excludes functions from torch.compile without importing its compiler, which takes longer than all of db-SP."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["not_compiled"]

P = ParamSpec("P")
Result = TypeVar("Result")


def not_compiled(function: Callable[P, Result]) -> Callable[P, Result]:
    """Works as torch.compiler.disable: a compiled caller's graph breaks here, and the function runs as it is written.

    Nothing is compiled while nothing has imported torch's compiler. Not for hooks of modules: what
    torch.compile(fullgraph=True) leaves out calls them itself, and would compile this wrapper.
    """
    excluded: list[Callable[P, Result]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not excluded:
            excluded.append(torch.compiler.disable(function))
        return excluded[0](*args, **kwargs)

    return call
