"""One run at a time for one video: two would write one log, and leave one's video with the other's report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dbsp_core.utils.errors import UserError

__all__ = ["exclusive_run"]


@contextmanager
def exclusive_run(lock: Path, video: Path) -> Iterator[bool]:
    """Holds a lock file, which is gone afterwards. The system releases it however a process ends.

    yields: whether this is known to be the only run; False where the file system knows no locks
    Raises UserError where another run has it.
    """
    file = _locked(lock, video)
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
            lock.unlink(missing_ok=True)


def _locked(lock: Path, video: Path) -> BinaryIO | None:
    try:
        import fcntl
    except ImportError:  # not on POSIX
        return None
    while True:
        file = lock.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, lock):
                return file
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "its process is just starting"
            file.close()
            raise UserError(
                f"another run is making {video} ({holder}); wait for it, or give another file with --out"
            ) from None
        except OSError:
            file.close()
            return None
        file.close()


def _is_named(file: BinaryIO, path: Path) -> bool:
    """Whether the file still has that name: the run before may have removed it between opening and locking."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
