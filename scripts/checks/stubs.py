"""Stubs of packages that need a GPU: programs import them here, and use nothing of them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def stub(names: tuple[str, ...], attribute: Callable[[str], Any]) -> None:
    """Makes empty modules importable: those of these names, and all of packages of these names.

    Args:
        attribute: Makes what a module has of a name.
    """
    sys.meta_path.insert(0, _Absent(names, attribute))


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...], attribute: Callable[[str], Any]) -> None:
        self._names, self._attribute = names, attribute

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._names or name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self._attribute(name)

        module.__file__ = __file__
        module.__version__ = "0.28"  # type: ignore[attr-defined]  # transformers compares it
        module.__getattr__ = attribute  # type: ignore[method-assign]
