"""Commands and commits of the files of docs/results, and changes of their sources since."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

from dbsp_core.utils.schema import build
from scripts.results.result import FOLDER

ROOT = FOLDER.parents[1]
EVIDENCE = FOLDER / "evidence.yaml"
KINDS = ("counted", "measured", "modelled", "fitted", "read from machine code", "published")


@dataclass(frozen=True)
class Evidence:
    """How some files of docs/results came to be; `evidence.yaml` says what each field means."""

    files: tuple[str, ...]
    what: str
    command: str
    how: tuple[str, ...]
    commit: str
    sources: tuple[str, ...]
    machine: str | None = None

    def all_sources(self) -> list[str]:
        """Returns `sources`, and the files of `scripts` that the command's module imports, directly or not."""
        words = self.command.split()
        modules = imported_scripts(words[words.index("-m") + 1]) if "-m" in words else set()
        return [*self.sources, *sorted(modules)]


def read_evidence() -> list[Evidence]:
    """Reads docs/results/evidence.yaml."""
    entries = yaml.safe_load(EVIDENCE.read_text(encoding="utf-8"))
    return [build(Evidence, entry, f"entry {number} of {EVIDENCE.name}") for number, entry in enumerate(entries, 1)]


def changes_since(entry: Evidence) -> list[str] | None:
    """Returns the sources' files that have changed since its commit; None where this clone lacks that commit."""
    if _git("cat-file", "-e", f"{entry.commit}^{{commit}}") is None:
        return None
    return (_git("diff", "--name-only", entry.commit, "--", *entry.all_sources()) or "").splitlines()


def imported_scripts(module: str) -> set[str]:
    """Returns the files of `scripts` that a module of it is made of: its own and those that they import."""
    files: set[str] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop())
        if path is not None and (relative := path.relative_to(ROOT).as_posix()) not in files:
            files.add(relative)
            waiting += _imports(ast.parse(path.read_text(encoding="utf-8")))
    return files


def _file_of(module: str) -> Path | None:
    """The file of a module of `scripts`, or None for anything else."""
    if not module.startswith("scripts."):
        return None
    path = ROOT.joinpath(*module.split("."))
    return next(
        (candidate for candidate in (path.with_suffix(".py"), path / "__main__.py") if candidate.is_file()), None
    )


def _imports(tree: ast.AST) -> Iterable[str]:
    """The modules that a program imports; of `from a import b` both a and a.b, of which one may not exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
