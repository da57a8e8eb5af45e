"""Hooks on modules that are named by their paths, for as long as a transformer lives."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import modules_at

Hook = Callable[..., Any]
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Modules that db-SP changes, each with the transformer that it is a part of."""


class HooksByPath:
    """Hooks that follow their paths: a LoRA or a quantiser puts a layer of its own in place of one that is hooked.

    Args:
        root: The transformer.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._hooks: list[tuple[str, Callable[[nn.Module], RemovableHandle], dict[nn.Module, RemovableHandle]]] = []
        """Each path with what hooks a module there, and the modules that are hooked."""

    def before(self, path: str, make: Callable[[nn.Module], Hook]) -> None:
        """Calls make(module), which is given arguments by position and by name, before the modules at a path.

        The root's own hooks are not among these.
        """
        self._hooks.append((path, lambda module: module.register_forward_pre_hook(make(module), with_kwargs=True), {}))

    def after(self, path: str, hook: Hook) -> None:
        """Calls a function after the modules at a path."""
        self._hooks.append((path, lambda module: module.register_forward_hook(hook), {}))

    def claim(self, module: nn.Module) -> None:
        """Raises UserError for a part of two transformers, in which hooks of one would run in passes of the other."""
        owner = _owners.get(module)
        if owner is not None and owner() not in (None, self._root):
            raise UserError(
                f"a {type(module).__name__} of this {type(self._root).__name__} belongs to another transformer on "
                "which db-SP is enabled, too; give each its own with copy.deepcopy(transformer), or call "
                "dbsp_diffusers.disable on the other first"
            )
        _owners[module] = weakref.ref(self._root)

    def follow(self) -> None:
        """Hooks what is at the paths now, and nothing else. Call it before each forward pass."""
        for path, register, handles in self._hooks:
            now = [_unwrapped(module) for module in modules_at(self._root, path)]
            for gone in [module for module in handles if module not in now]:
                handles.pop(gone).remove()
            for module in now:
                if module is not self._root and module not in handles:
                    self.claim(module)
                    handles[module] = register(module)

    def remove(self) -> None:
        """Removes all hooks, and lets other transformers have the modules."""
        for _, _, handles in self._hooks:
            for handle in handles.values():
                handle.remove()
            handles.clear()
        for module in [module for module, owner in _owners.items() if owner() is self._root]:
            del _owners[module]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns a module within torch.compile's wrapper, and within that of torch's `checkpoint_wrapper`."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = getattr(module, name, module)
    return module
