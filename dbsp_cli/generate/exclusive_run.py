"""Lock files that let only one run at a time make a video or a report: two would mix their logs and results."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dbsp_core.utils.errors import UserError

__all__ = ["exclusive_run"]


_HOLDER = re.compile(rb"process \d+ on \S*")


@contextmanager
def exclusive_run(lock: Path, making: str, option: str) -> Iterator[bool]:
    """Holds a lock file, which is removed afterwards. The system releases the lock however the process ends.

    Yields whether this is known to be the only run: False where the file system has no locks.

    Args:
        making: What the lock is for, in words.
        option: The option that gives another place.

    Raises:
        UserError: Another run has the lock, or the file is not a lock of db-SP's.
    """
    file = _locked(lock, making, option)
    if file is None:
        yield False
        return
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}".encode())
        file.flush()
        try:
            yield True
        finally:
            if _is_named(file, lock):
                lock.unlink()


def _locked(lock: Path, making: str, option: str) -> BinaryIO | None:
    try:
        import fcntl
    except ImportError:  # not on POSIX
        return None
    while True:
        file = _opened(lock, option)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, lock):
                _require_lock(file, lock, option)
                return file
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).decode(errors="replace") or "its process is just starting"
            file.close()
            raise UserError(
                f"another run is making {making} ({holder}); wait for it, or give another place with {option}"
            ) from None
        except UserError:
            file.close()
            raise
        except OSError:
            file.close()
            return None
        file.close()


def _opened(lock: Path, option: str) -> BinaryIO:
    """Opens the lock without following a link, which may lead to somebody's file."""
    if lock.is_symlink() or (lock.exists() and not lock.is_file()):
        raise _not_a_lock(lock, option)
    return os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666), "a+b")


def _require_lock(file: BinaryIO, lock: Path, option: str) -> None:
    """Raises UserError for a file with anything but a holder's name in it, which must be kept."""
    file.seek(0)
    content = file.read(200)
    if content and not _HOLDER.fullmatch(content):
        raise _not_a_lock(lock, option)


def _not_a_lock(lock: Path, option: str) -> UserError:
    return UserError(f"{lock} is not a lock of db-SP's; remove it, or give another place with {option}")


def _is_named(file: BinaryIO, path: Path) -> bool:
    """False where the file has lost its name: the run before may have removed it between opening and locking."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False
