"""How a rank ends on a user's mistake."""

from __future__ import annotations

import sys
from typing import NoReturn

from dbsp_core.generation.launching import ERROR

__all__ = ["exit_with", "is_ours"]


def is_ours(error: BaseException) -> bool:
    """Whether an error was raised by db-SP's own code, hence says all there is to say in its message."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith("dbsp_")


def exit_with(error: ValueError) -> NoReturn:
    """One line for a user's mistake, and exit code 2."""
    sys.stderr.write(f"{ERROR}{error}\n")
    sys.stderr.flush()
    raise SystemExit(2) from error
