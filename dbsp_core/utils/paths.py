"""Checks, before anything is computed, that results can be written to the places that a user gave."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dbsp_core.utils.errors import UserError

__all__ = ["require_file_place", "require_folder_place", "require_place"]


def require_file_place(path: Path, what: str) -> None:
    """Raises UserError unless a file can be written there; `what` names the path in the message."""
    if path.is_dir():
        raise UserError(f"{what} {path} is a folder; give the name of a file")
    if not path.exists() or path.is_file():
        require_place(path, what)
    elif not os.access(path, os.W_OK):  # a device or a pipe, which is written to as it is
        raise UserError(f"{what} {path} cannot be written to; give another place")


def require_folder_place(path: Path, what: str) -> None:
    """Raises UserError unless the folder can be made and written to."""
    if path.exists() and not path.is_dir():
        raise UserError(f"{what} {path} is a file; give the name of a folder")
    _require_writable(Path(os.path.realpath(path)), f"{what} {path}")


def require_place(path: Path, what: str) -> None:
    """Raises UserError unless something can be put there, or where it leads if it is a link."""
    _require_writable(Path(os.path.realpath(path)).parent, f"{what} {path}")


def _require_writable(folder: Path, what: str) -> None:
    """Raises UserError unless the folder can be made and written to; permissions do not say all, so it is tried."""
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir():
        raise UserError(f"{what}: {there} is a file, not a folder; give another place")
    refused = UserError(f"{what}: folder {there} cannot be written to; give another place, or make it writable")
    if not os.access(there, os.W_OK | os.X_OK):
        raise refused
    try:
        os.rmdir(tempfile.mkdtemp(dir=there, prefix=".dbsp-"))
    except OSError as error:
        raise refused from error
