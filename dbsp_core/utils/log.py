"""The logger "dbsp": lines `dbsp: …` on standard error, unless the application gave it handlers of its own.

`dbsp generate` recognises the lines of its ranks by these prefixes.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["ERROR", "NOTICE", "log", "printable"]

NOTICE = "dbsp: "
"""Prefix of lines for the user."""
ERROR = NOTICE + "error: "
"""Prefix of the line that names a user's mistake."""


def printable(text: str) -> str:
    """Returns a text that is safe to print: control characters, as in terminal escapes, are written as "\\x1b".

    Line breaks stay.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode("ascii") for one in text
    )


class _StandardError(logging.Handler):
    """Writes to `sys.stderr` as it is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = ERROR if record.levelno >= logging.ERROR else NOTICE
        sys.stderr.write(f"{prefix}{printable(self.format(record))}\n")
        sys.stderr.flush()


def _logger() -> logging.Logger:
    logger = logging.getLogger("dbsp")
    if not logger.handlers:
        logger.addHandler(_StandardError())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # a library that configures the root logger would repeat or reformat each line
    return logger


log = _logger()
