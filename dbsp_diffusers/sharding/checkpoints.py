"""Activation checkpointing: what backward computes again belongs to the forward pass that it was computed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dbsp_core.runtime.forward_passes import ForwardPasses
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet

_FUNCTIONS = "_gradient_checkpointing_func", "checkpoint_fn"
"""Attributes of modules that call checkpoint(function, *args): diffusers' models, torch's CheckpointWrapper."""


class Checkpoints:
    """Wraps the checkpoint functions of a transformer's modules, so that each pass is recomputed as that pass.

    Args:
        passes: The transformer's forward passes.
    """

    def __init__(self, transformer: nn.Module, passes: ForwardPasses, patches: PatchSet) -> None:
        self.passes, self.attached = passes, True
        self._transformer = transformer
        patches.on_detach(self._release)

    def follow(self) -> None:
        """Wraps the functions that were set since the last pass. Call it before each pass with gradients."""
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
    """A checkpoint function, which is called with a function and its arguments."""

    def __init__(self, function: Callable[..., Any], checkpoints: Checkpoints) -> None:
        self.function, self.checkpoints = function, checkpoints

    @torch.compiler.disable
    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.function(_OfPass(function, self.checkpoints), *args, **kwargs)


class _OfPass:
    """A module or function as a checkpoint calls it: first in the forward pass, and then to compute that again."""

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
        """Returns what checkpoint functions ask of a module, such as its parameters."""
        return getattr(self._function, name)
