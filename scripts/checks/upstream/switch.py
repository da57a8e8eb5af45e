"""Runs the transformers that a test suite makes with db-SP and dense masks, or stock, and keeps what they return."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.session import AttentionSession
from scripts.checks.upstream.counting import count_attention

__all__ = ["Outputs", "enable_dense", "install", "known_classes"]

CONFIG = {"mask": {"source": "dense", "block_q": 24, "block_k": 24}}
"""Blocks that divide few numbers of tokens."""
STRATEGY = "DBSP_UPSTREAM_STRATEGY"
"""Environment: how ranks are used, where the suite itself does not say."""
ENTRIES = ("__call__", "compile", "compile_repeated_blocks")
"""What a model must be enabled before. `__call__`, since `forward` would be too late for hooks."""


class Outputs:
    """What models returned, by test: `values[test]` is a list of tensors."""

    def __init__(self) -> None:
        self.values: dict[str, list[torch.Tensor]] = {}
        self.test = ""

    def add(self, returned: Any) -> None:
        tensor = returned[0] if isinstance(returned, (tuple, list)) else getattr(returned, "sample", returned)
        if isinstance(tensor, torch.Tensor):
            self.values.setdefault(self.test, []).append(tensor.detach().clone())


def enable_dense(model: nn.Module) -> None:
    """Enables db-SP where it is not, over the ranks there are."""
    import dbsp_diffusers

    if dbsp_diffusers.session_of(model) is None:
        dbsp_diffusers.enable(model, CONFIG, strategy=os.environ.get(STRATEGY))


def install(classes: list[type[nn.Module]], enabled: bool, outputs: Outputs) -> Callable[[], None]:
    """Makes models of these classes run with db-SP, if `enabled`, and writes their outputs.

    Returns: what undoes it.
    """
    undo = [_wrap(cls, name, enabled, outputs) for cls in classes for name in ENTRIES]
    stock_compile, attend = torch.compile, AttentionSession.attend

    def counted(self: AttentionSession, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            count_attention()
        return attend(self, *args, **kwargs)

    def compile_after(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if enabled and type(model) in classes:
            enable_dense(model)
        return stock_compile(model, *args, **kwargs)

    def all_undone() -> None:
        torch.compile, AttentionSession.attend = stock_compile, attend
        for one in undo:
            one()

    torch.compile, AttentionSession.attend = compile_after, counted
    return all_undone


def _wrap(cls: type[nn.Module], name: str, enabled: bool, outputs: Outputs) -> Callable[[], None]:
    own = cls.__dict__.get(name)
    before = getattr(cls, name)

    @functools.wraps(before)
    def entry(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return before(self, *args, **kwargs)
        if enabled:
            enable_dense(self)
        returned = before(self, *args, **kwargs)
        if name == "__call__":
            outputs.add(returned)
        return returned

    setattr(cls, name, entry)

    def restore() -> None:
        if own is None:
            delattr(cls, name)
        else:
            setattr(cls, name, own)

    return restore


def known_classes() -> list[type[nn.Module]]:
    """diffusers' transformer classes that db-SP runs."""
    import diffusers

    from dbsp_diffusers.models.table import ARCHITECTURES

    return [getattr(diffusers, name) for name in ARCHITECTURES if hasattr(diffusers, name)]
