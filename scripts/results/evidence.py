"""Commands and commits of the files of docs/results, and changes of their sources since."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

import yaml

from dbsp_core.utils.schema import build
from scripts.results.result import FOLDER

ROOT = FOLDER.parents[1]
EVIDENCE = FOLDER / "evidence.yaml"
KINDS = ("counted", "measured", "modelled", "fitted", "read from machine code", "published")


@dataclass(frozen=True)
class Evidence:
    """Origin of some files of docs/results; `evidence.yaml` says what each field means."""

    files: tuple[str, ...]
    what: str
    command: str
    how: tuple[str, ...]
    commit: str
    sources: tuple[str, ...]
    machine: str | None = None

    def all_sources(self) -> list[str]:
        """Returns `sources`, and the folder of the command's module."""
        module = re.search(r"-m (\S+)\.", self.command)
        return [*self.sources, module[1].replace(".", "/")] if module else list(self.sources)


def read_evidence() -> list[Evidence]:
    entries = yaml.safe_load(EVIDENCE.read_text(encoding="utf-8"))
    return [build(Evidence, entry, f"entry {number} of {EVIDENCE.name}") for number, entry in enumerate(entries, 1)]


def changes_since(entry: Evidence) -> list[str] | None:
    """Returns the sources' files that have changed since its commit; None where this clone lacks that commit."""
    if _git("cat-file", "-e", f"{entry.commit}^{{commit}}") is None:
        return None
    return (_git("diff", "--name-only", entry.commit, "--", *entry.all_sources()) or "").splitlines()


def _git(*arguments: str) -> str | None:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None
