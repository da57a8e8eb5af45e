"""Hooks on modules that are named by their paths, for as long as a transformer lives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dbsp_diffusers.models.architecture import modules_at

__all__ = ["HooksByPath"]

Hook = Callable[..., Any]


@dataclass(eq=False)
class _AtPath:
    path: str
    register: Callable[[nn.Module], Callable[[Hook], RemovableHandle]]
    make: Callable[[nn.Module], Hook]
    handles: dict[nn.Module, RemovableHandle] = field(default_factory=dict)


class HooksByPath:
    """Hooks that follow their paths: a LoRA or a quantiser puts a layer of its own in place of one that is hooked.

    Args:
        root: The transformer.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._hooks: list[_AtPath] = []

    def before(self, path: str, make: Callable[[nn.Module], Hook]) -> None:
        """Calls make(module), which is given arguments by position and by name, before the modules at a path.

        The root's own hooks are not among these.
        """

        def register(module: nn.Module) -> Callable[[Hook], RemovableHandle]:
            return lambda hook: module.register_forward_pre_hook(hook, with_kwargs=True)

        self._add(_AtPath(path, register, make))

    def after(self, path: str, hook: Hook) -> None:
        """Calls a function after the modules at a path."""
        self._add(_AtPath(path, lambda module: module.register_forward_hook, lambda module: hook))

    def _add(self, hooks: _AtPath) -> None:
        self._hooks.append(hooks)
        self._place(hooks)

    def follow(self) -> None:
        """Moves the hooks of modules that were replaced. Call it before each forward pass."""
        for hooks in self._hooks:
            self._place(hooks)

    def remove(self) -> None:
        """Removes all hooks."""
        for hooks in self._hooks:
            for handle in hooks.handles.values():
                handle.remove()
            hooks.handles.clear()

    def _place(self, hooks: _AtPath) -> None:
        now = [getattr(module, "_orig_mod", module) for module in modules_at(self._root, hooks.path)]
        for gone in [module for module in hooks.handles if module not in now]:
            hooks.handles.pop(gone).remove()
        for module in now:
            if module is not self._root and module not in hooks.handles:
                hooks.handles[module] = hooks.register(module)(hooks.make(module))
