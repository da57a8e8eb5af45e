"""Texts of the repository's pages and sources, for tests that read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sized
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests.support.repository import ROOT

_OUTSIDE_DOCS = ("README", "CONTRIBUTING", "CHANGES", "examples/README", "scripts/README", "tests/README")
PAGES = [*(ROOT / f"{name}.md" for name in _OUTSIDE_DOCS), *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1[^\n]*$", re.S | re.M)
Found = TypeVar("Found", bound=Sized)


def found_in(paths: Iterable[Path], look: Callable[[Path], Found]) -> dict[str, Found]:
    """Returns what is found in files that must not be there, by file."""
    found = {str(path.relative_to(ROOT)): look(path) for path in paths}
    return {path: names for path, names in found.items() if names}


def without_code_blocks(page: str) -> str:
    """Returns a page with empty lines for what is between its fences."""
    return _FENCE.sub(lambda found: "\n" * found.group().count("\n"), page)


def tree_of(path: Path) -> ast.Module:
    """Returns the syntax tree of a source file, which nobody may change."""
    return _parsed(path.read_text(encoding="utf-8"))


def nodes_of(path: Path) -> list[ast.AST]:
    """Returns all nodes of a source file's syntax tree."""
    return _walked(path.read_text(encoding="utf-8"))


_parsed = cache(ast.parse)
_walked = cache(lambda source: list(ast.walk(_parsed(source))))


def strings_of(path: Path) -> set[str]:
    """Returns a source file's other texts."""
    prose = {id(text) for text in _docstrings(path)}
    constants = (node for node in nodes_of(path) if isinstance(node, ast.Constant) and id(node) not in prose)
    return {node.value for node in constants if isinstance(node.value, str)}


def _docstrings(path: Path) -> list[ast.Constant]:
    statements = (node.value for node in nodes_of(path) if isinstance(node, ast.Expr))
    return [value for value in statements if isinstance(value, ast.Constant) and isinstance(value.value, str)]
