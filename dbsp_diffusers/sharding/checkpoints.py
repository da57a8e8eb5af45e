"""Activation checkpointing: assigns recomputation in backward to its original forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.forward_passes import ForwardPasses
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet

_FUNCTIONS = "_gradient_checkpointing_func", "checkpoint_fn"
"""Attributes with checkpoint functions, checkpoint(function, *args): of diffusers' models and CheckpointWrapper."""


class Checkpoints:
    """Wraps the checkpoint functions of a transformer's modules, so that recomputation knows its pass."""

    def __init__(self, transformer: nn.Module, passes: ForwardPasses, patches: PatchSet) -> None:
        self.passes, self.attached = passes, True
        self._transformer = transformer
        patches.on_detach(self._release)

    def follow(self) -> None:
        """Wraps functions set since the last pass; call it before each pass with gradients."""
        for module in self._transformer.modules():
            for name in _FUNCTIONS:
                function = vars(module).get(name)
                if callable(function) and not isinstance(function, _Checkpoint):
                    setattr(module, name, _Checkpoint(function, self))

    def _release(self) -> None:
        self.attached = False
        for module in self._transformer.modules():
            for name in _FUNCTIONS:
                function = vars(module).get(name)
                if isinstance(function, _Checkpoint) and function.checkpoints is self:
                    setattr(module, name, function.function)


class _Checkpoint:
    def __init__(self, function: Callable[..., Any], checkpoints: Checkpoints) -> None:
        self.function, self.checkpoints = function, checkpoints

    @torch.compiler.disable
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.function(_OfPass(function, self.checkpoints), *args, **kwargs)


class _OfPass:
    """A function called by a checkpoint: first in the forward pass, later to recompute it."""

    def __init__(self, function: Callable[..., Any], checkpoints: Checkpoints) -> None:
        self._function, self._checkpoints, self._pass = function, checkpoints, checkpoints.passes.now
        self._was_called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._was_called:
            self._was_called = True
            return self._function(*args, **kwargs)
        if not self._checkpoints.attached:
            raise UserError(
                "db-SP was disabled between a forward pass with gradient checkpointing and its backward; call "
                "backward() before `disable`"
            )
        with self._checkpoints.passes.resumed(self._pass):
            return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Delegates attributes such as a module's parameters."""
        return getattr(self._function, name)
