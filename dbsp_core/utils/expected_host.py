"""Checks a framework's version and private names before a plug-in wraps them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from dbsp_core.utils.process import installed_version
from dbsp_kernels.errors import page


@dataclass(frozen=True)
class ExpectedHost:
    """The framework release that a plug-in was written for, and the names that it uses."""

    name: str  # name in messages
    package: str  # pip package
    version: str | None  # release; "0.30" also allows 0.30.1. None: the framework has no releases
    names: tuple[str, ...]  # functions, classes and attributes as "module:Class.attribute"

    def problem(self) -> str | None:
        """Returns a one-line description of how the installed framework differs, or None; does not import it."""
        installed = installed_version(self.package) or "of unknown version"
        fix = f"install a version that {page('engines')} names"
        if self.version is not None and not f"{installed}.".startswith(f"{self.version}."):
            return f"db-SP expects {self.name} {self.version}, and this is {installed}; {fix}"
        missing = [name for name in self.names if not is_defined(name)]
        if missing:
            return f"db-SP expects {', '.join(missing)}, which this {self.name} ({installed}) does not define; {fix}"
        return None


def is_defined(name: str) -> bool:
    """Returns True if the source of "module:Class.attribute" defines or imports it, or a method sets the attribute."""
    module, _, inside = name.partition(":")
    scope = _tree_of(module)
    for part in inside.split("."):
        nodes = () if scope is None else ast.walk(scope)
        scope = next((node for node in nodes if _defines(node, part)), None)
    return scope is not None


@lru_cache(maxsize=1)
def _tree_of(module: str) -> ast.AST | None:
    package, *folders = module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], *folders)
    file = next(filter(Path.is_file, (path.with_suffix(".py"), path / "__init__.py")), None)
    return None if file is None else ast.parse(file.read_bytes())


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, ast.alias):
        return (node.asname or node.name) == name
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Store)
    return isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
