"""Ends a process without taking apart what it has imported.

With torch and its hosts that would take one to two seconds, in which others wait for the process, and in which gloo's
threads can abort it.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["quick_end"]


@contextmanager
def quick_end() -> Iterator[None]:
    """Wraps a whole program, before it imports much: its process ends right after its `atexit` functions.

    Its threads have been waited for by then, errors have been shown, and the exit code is what it would have been. An
    interrupt is left to the interpreter, as is output that cannot be written.
    """
    code: int | None = None

    def end() -> None:
        if code is not None:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    atexit.register(end)  # registered first, so called last
    try:
        yield
        code = 0
    except SystemExit as stopped:
        code = _code_of(stopped.code)
        raise
    except Exception:
        code = 1
        raise


def _code_of(said: object) -> int:
    """The exit code that the interpreter gives `sys.exit(said)`."""
    if said is None:
        return 0
    return said & 0xFF if isinstance(said, int) else 1
