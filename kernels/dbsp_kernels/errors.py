"""Errors that are the user's to mend, as opposed to db-SP's own."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """Something the user can put right: a setting, a file, an input or a host that does not fit.

    Its message is one line that names the problem and the fix, so a command shows nothing else and exits with 2. Every
    other exception is a fault of db-SP or of what it runs on, and keeps its traceback.

    Args:
        message: Line breaks in it, as names of files and other errors' texts may have them, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
