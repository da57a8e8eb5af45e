"""Hooks on a transformer's modules by path, which follow replaced modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import modules_at
from dbsp_diffusers.patching import Arguments, signature_of

Spec = Any  # specification of an argument or output, passed to a change
Change = Callable[[Any, Spec], Any]  # returns the replacement of an argument or output
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
_owners: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Hooked modules by the transformer that they belong to."""


class HooksByPath:
    """Hooks that follow their paths, since a LoRA or quantizer may replace a hooked layer; `root`: the transformer."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._hooks: list[tuple[str, Callable[[nn.Module], RemovableHandle], dict[nn.Module, RemovableHandle]]] = []
        """Each path with its register function and the handles of hooked modules."""

    def before(self, path: str, arguments: Mapping[str, Spec], change: Change) -> None:
        """Changes arguments of the modules at a path, except the root; see `changing_arguments`."""

        def register(module: nn.Module) -> RemovableHandle:
            return module.register_forward_pre_hook(changing_arguments(module, arguments, change), with_kwargs=True)

        self._hooks.append((path, register, {}))

    def after(self, path: str, outputs: Mapping[int, Spec], change: Change) -> None:
        """Changes outputs of the modules at a path; see `changing_outputs`."""
        hook = changing_outputs(outputs, change)
        self._hooks.append((path, lambda module: module.register_forward_hook(hook), {}))

    def claim(self, module: nn.Module) -> None:
        """Raises UserError for a module of two transformers, where hooks of one would run in passes of the other."""
        owner = _owners.get(module)
        if owner is not None and owner() not in (None, self._root):
            raise UserError(
                f"a {type(module).__name__} of this {type(self._root).__name__} belongs to another transformer on "
                "which db-SP is enabled, too; give each its own with copy.deepcopy(transformer), or call "
                "dbsp_diffusers.disable on the other first"
            )
        _owners[module] = weakref.ref(self._root)

    def follow(self) -> None:
        """Hooks exactly the modules that are now at the paths; call it before each forward pass."""
        for path, register, handles in self._hooks:
            now = [_unwrapped(module) for module in modules_at(self._root, path)]
            for gone in [module for module in handles if module not in now]:
                handles.pop(gone).remove()
            for module in now:
                if module is not self._root and module not in handles:
                    self.claim(module)
                    handles[module] = register(module)

    def remove(self) -> None:
        """Removes all hooks and releases the modules."""
        for _, _, handles in self._hooks:
            for handle in handles.values():
                handle.remove()
            handles.clear()
        for module in [module for module, owner in _owners.items() if owner() is self._root]:
            del _owners[module]


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns a module without wrappers of torch.compile and torch's `checkpoint_wrapper`."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        module = getattr(module, name, module)
    return module


def changing_arguments(
    module: nn.Module, arguments: Mapping[str, Spec], change: Change
) -> Callable[[nn.Module, Args, Kwargs], Arguments]:
    """Returns a hook that changes positional or keyword arguments of a module's forward.

    Raises UserError if the module does not have one of `arguments`.
    """
    names = list(signature_of(module).parameters)
    unknown = [name for name in arguments if name not in names]
    if unknown:
        raise UserError(
            f"{type(module).__name__} has no argument {unknown[0]}, which db-SP cuts; install the version of "
            "diffusers that db-SP is tested with (constraints.txt)"
        )
    positions = {name: names.index(name) for name in arguments}

    def changed(module: nn.Module, args: Args, kwargs: Kwargs) -> Arguments:
        positional, named = list(args), dict(kwargs)
        for name, spec in arguments.items():
            if name in named:
                named[name] = change(named[name], spec)
            elif positions[name] < len(positional):
                positional[positions[name]] = change(positional[positions[name]], spec)
        return tuple(positional), named

    return changed


def changing_outputs(outputs: Mapping[int, Spec], change: Change) -> Callable[[nn.Module, Args, Any], Any]:
    """Returns a hook that changes a module's outputs by index (a single output is 0)."""

    @torch.compiler.disable
    def changed(module: nn.Module, args: Args, output: Any) -> Any:
        if isinstance(output, (torch.Tensor, Mapping)):
            return change(output, outputs[0])
        return tuple(
            change(element, outputs[index]) if index in outputs else element for index, element in enumerate(output)
        )

    return changed
