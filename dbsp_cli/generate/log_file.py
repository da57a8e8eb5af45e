"""The file that ranks' output goes to, known by its first line: another's file of that name is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from dbsp_core.utils.atomic_io import write_atomically
from dbsp_core.utils.errors import UserError

__all__ = ["new_log", "require_own_log", "reword_log"]

_FIRST = b"dbsp: output of ranks\n"


def require_own_log(log: Path) -> None:
    """Raises UserError where there is something that no run has written."""
    if log.is_dir():
        raise UserError(f"{log}, where the ranks' output is to go, is a folder; give another file with --out")
    if not log.is_file():
        return
    with log.open("rb") as file:
        if file.read(len(_FIRST)) not in (b"", _FIRST):
            raise UserError(
                f"{log}, where the ranks' output is to go, is not a log of db-SP's; move it away, or give another "
                "file with --out"
            )


def reword_log(log: Path, reword: Callable[[str], str]) -> None:
    """Puts a whole log into other words."""
    said = log.read_bytes().decode(errors="surrogateescape")
    reworded = reword(said)
    if reworded != said:
        write_atomically(log, reworded.encode(errors="surrogateescape"))


def new_log(log: Path) -> BinaryIO:
    """An empty log to write to, in place of the last run's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    require_own_log(log)
    file = log.open("wb")
    file.write(_FIRST)
    return file
