"""Atomic writes, checks of paths, and sizes in bytes."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from dbsp_core.utils.errors import UserError, cut_short

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Parses a size such as "2GiB", "500 MB" or a plain number. Raises UserError for other text."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in _UNITS:
        raise UserError(f"size {text!r} is not of the form '2GiB'; units are {', '.join(u for u in _UNITS if u)}")
    return int(float(match[1]) * _UNITS[match[2]])


def in_bytes(count: float) -> str:
    """Returns a number of bytes as text, such as "512 B" or "1.25 MiB"."""
    amount, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, bigger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"


def expand_path(path: str | os.PathLike[str]) -> str:
    """Expands "~" and "~NAME" at the beginning of a path, like a shell. Raises UserError for an empty path.

    A path that the locale cannot encode is encoded in UTF-8.
    """
    if not os.fspath(path):
        raise UserError("path '' is empty; give the name of a file or folder, or omit it")
    return os.fsdecode(os.path.expanduser(path).encode("utf-8", "surrogateescape"))


def user_path(path: str | os.PathLike[str]) -> Path:
    """Returns `expand_path(path)` as a Path."""
    return Path(expand_path(path))


def require_file(path: Path, what: str, advice: str) -> None:
    """Raises UserError unless `path`, called `what`, is a readable file; `advice` is the fix."""
    shown = f"{what} {cut_short(str(path))}"
    try:
        mode = path.stat().st_mode
        pointer = stat.S_ISREG(mode) and is_pointer(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{shown} does not exist; {advice}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{shown} cannot be read ({getattr(error, 'strerror', None) or error}); {advice}") from None
    if not stat.S_ISREG(mode):
        kind = "folder" if stat.S_ISDIR(mode) else "pipe or device"
        raise UserError(f"{shown} is a {kind}, not a file; {advice}")
    if pointer:
        raise UserError(f"{shown} is a pointer of Git LFS, not the file itself; fetch the file with git lfs pull")


def read_text(path: Path) -> str:
    """Reads text as UTF-8 in every locale, without a byte order mark. Raises UnicodeError if it is not text."""
    return path.read_bytes().decode("utf-8-sig")


def is_pointer(path: Path) -> bool:
    """Returns True for a pointer that Git LFS leaves in place of a file."""
    beginning = b"version https://git-lfs"
    with path.open("rb") as file:
        return file.read(len(beginning)) == beginning and path.stat().st_size <= 1024  # limit of its specification


TEMPORARY = ".dbsp-"
"""Prefix of temporary files and folders; without the user's file name, which could make names too long."""


def require_folder_path(path: Path, what: str) -> None:
    """Raises UserError unless the folder can be created and written to."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise UserError(f"{what} {path} is a file; give the name of a folder")
    _require_writable(path, what, Path(os.path.realpath(path)))


def require_file_path(path: Path, what: str) -> None:
    """Raises UserError unless a file can be written there; `what` names the path in the message."""
    if os.path.isdir(path):
        raise UserError(f"{what} {path} is a folder; give the name of a file")
    if not os.path.exists(path) or os.path.isfile(path):
        require_path(path, what)
    elif not os.access(path, os.W_OK):  # device or pipe, written in place
        raise UserError(f"{what} {path} cannot be written to; give another path")


def require_path(path: Path, what: str) -> None:
    """Raises UserError unless `path`, or the target of the link, can be created."""
    _require_writable(path, what, Path(os.path.realpath(path)).parent)


def _require_writable(path: Path, what: str, folder: Path) -> None:
    """Raises UserError unless `folder` can be created and written to, by trying it: permissions are not conclusive."""
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not existing.is_dir():
        raise UserError(f"{what} {path}: {existing} is a file, not a folder; give another path")
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)  # raises if the name is too long
        os.rmdir(tempfile.mkdtemp(dir=existing, prefix=TEMPORARY))
    except OSError as error:
        raise UserError(
            f"{what} {cut_short(str(path))} cannot be written to ({error.strerror}); give another path, or make "
            f"{existing} writable"
        ) from error


def write_atomically(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Writes a file that replaces the old one when it is complete.

    Follows links and keeps the mode of an existing file. A device or pipe is written in place.
    """
    content = content.encode() if isinstance(content, str) else content
    path = Path(path)
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        path.write_bytes(content)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(8)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
