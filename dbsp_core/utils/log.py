"""The logger "dbsp": one line each on standard error, `dbsp: …`, unless the application gave it handlers of its own.

`dbsp generate` reads the lines of its ranks by these prefixes.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["ERROR", "NOTICE", "log"]

NOTICE = "dbsp: "
"""Before a line for the user."""
ERROR = NOTICE + "error: "
"""Before the line that names a user's mistake."""


class _StandardError(logging.Handler):
    """Writes to what `sys.stderr` is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = ERROR if record.levelno >= logging.ERROR else NOTICE
        sys.stderr.write(f"{prefix}{self.format(record)}\n")
        sys.stderr.flush()


def _logger() -> logging.Logger:
    logger = logging.getLogger("dbsp")
    if not logger.handlers:
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library that configures the root logger would repeat or reformat each line
    return logger


log = _logger()
