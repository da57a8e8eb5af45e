"""Hooks on modules that are named by their paths, for as long as a transformer lives."""

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

Spec = Any
"""What a change is told of an argument or output."""
Change = Callable[[Any, Spec], Any]
"""Returns what takes the place of an argument or output."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
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

    def before(self, path: str, arguments: Mapping[str, Spec], change: Change) -> None:
        """Changes arguments of the modules at a path, but for the root; see `changing_arguments`."""

        def register(module: nn.Module) -> RemovableHandle:
            return module.register_forward_pre_hook(changing_arguments(module, arguments, change), with_kwargs=True)

        self._hooks.append((path, register, {}))

    def after(self, path: str, outputs: Mapping[int, Spec], change: Change) -> None:
        """Changes outputs of the modules at a path; see `changing_outputs`."""
        hook = changing_outputs(outputs, change)
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


def changing_arguments(
    module: nn.Module, arguments: Mapping[str, Spec], change: Change
) -> Callable[[nn.Module, Args, Kwargs], Arguments]:
    """Returns a hook that changes arguments of a module's forward, positional or by name as they come.

    Args:
        arguments: By name, what `change` is given with the argument.

    Raises:
        UserError: For an argument that the module does not have.
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
    """Returns a hook that changes a module's output, which is number 0, or some of several by number."""

    @torch.compiler.disable
    def changed(module: nn.Module, args: Args, output: Any) -> Any:
        if isinstance(output, (torch.Tensor, Mapping)):
            return change(output, outputs[0])
        return tuple(
            change(element, outputs[index]) if index in outputs else element for index, element in enumerate(output)
        )

    return changed
