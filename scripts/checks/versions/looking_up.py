"""A private name of a framework, and whether what is installed has it, as db-SP takes it to be."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from packaging.version import Version


@dataclass(frozen=True)
class PrivateName:
    """One name.

    where: "package.module:Class.attribute", or a module alone
    user:  the module of ours that relies on it
    takes: arguments by which we call it, or by which we are called instead of it
    says:  what must be in its source, as names of attributes that it sets
    since: the package's first version that has it, where db-SP goes with older ones too
    """

    where: str
    user: str
    takes: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    since: str = ""


def belongs(name: PrivateName, package: str) -> bool:
    """Returns True if the installed version of its package is one that should have it."""
    return not name.since or Version(version(package)) >= Version(name.since)


def message(name: PrivateName) -> str | None:
    """Returns what is not as db-SP takes it to be, in a few words; None where all is."""
    module, _, path = name.where.partition(":")
    try:
        if not path and not name.takes and module.endswith((".run", ".runner")):
            found: Any = importlib.util.find_spec(module)  # a program: importing it may run it
        else:
            found = pkgutil.resolve_name(name.where)
    except Exception as error:  # of any kind: a library raises what it likes for what it cannot import
        return f"{name.where}: {' '.join(str(error).split())}"
    lacking = [argument for argument in name.takes if argument not in _parameters(found)]
    if lacking:
        return f"{name.where} takes no {', '.join(lacking)}"
    silent = [text for text in name.says if text not in _source(found)]
    return f"{name.where} does not have {' or '.join(silent)} in its source" if silent else None


def _parameters(found: Any) -> set[str]:
    """Returns arguments through decorators, and what a class is made with."""
    return set(inspect.signature(found).parameters) | set(inspect.signature(inspect.unwrap(found)).parameters)


def _source(found: Any) -> str:
    origin = getattr(found, "origin", None)  # of a module that was not imported
    if isinstance(origin, str):
        with open(origin, encoding="utf-8") as file:
            return file.read()
    return inspect.getsource(found)
