"""The hidden folder in which a run makes its results, and putting them in place without losing any."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dbsp_core.utils.files import open_atomically

__all__ = ["RESULTS", "WorkFolder", "folder_at", "put_file", "put_folder", "remove_left_over", "work_folder"]

RESULTS = ("video.mp4", "report")
"""Names of a run's results in its work folder: a file and a folder."""


@dataclass
class WorkFolder:
    """A folder, and the names of its entries that are to stay."""

    path: Path
    kept: set[str] = field(default_factory=set)

    def keep(self, name: str) -> Path:
        """Leaves an entry where it is, and returns its path."""
        self.kept.add(name)
        return self.path / name


@contextmanager
def work_folder(parent: Path, name: str) -> Iterator[WorkFolder]:
    """Makes a hidden folder beside the results, on their file system, and removes all of it that is not kept."""
    folder = WorkFolder(Path(tempfile.mkdtemp(dir=parent, prefix=_prefix(name))))
    try:
        yield folder
    finally:
        for path in list(folder.path.iterdir()):
            if path.name not in folder.kept:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        _remove_if_empty(folder.path)


def _prefix(name: str) -> str:
    return f".{name}.dbsp-"


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def remove_left_over(parent: Path, name: str) -> list[Path]:
    """Removes work folders of runs that could not clean up, and returns the results that are still in some.

    Folders with results stay: a video may be complete, and took hours. No such run may be active.
    """
    pattern = re.compile(re.escape(_prefix(name)) + r"[a-z0-9_]+")
    results = []
    for folder in [path for path in parent.iterdir() if path.is_dir() and pattern.fullmatch(path.name)]:
        found = [folder / result for result in RESULTS if (folder / result).exists()]
        results += found
        if not found:
            shutil.rmtree(folder, ignore_errors=True)
    return results


def put_file(source: Path, target: Path) -> None:
    """Copies a file, which appears when it is complete; the target may be a link, or on another disk."""
    with open_atomically(target) as file:
        _copy(source, file)


def put_folder(folder: Path, target: Path) -> None:
    """Copies a folder's files to another, maybe on another disk: all of them, or none where one fails."""
    with ExitStack() as files:
        if not target.exists():
            files.callback(_remove_if_empty, target)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            _copy(path, files.enter_context(open_atomically(target / path.relative_to(folder))))


def _copy(path: Path, file: BinaryIO) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, file)
    file.flush()


@contextmanager
def folder_at(path: Path) -> Iterator[None]:
    """Makes a folder with its parents, and removes those it made that are empty afterwards."""
    made = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for place in made:
            _remove_if_empty(place)
