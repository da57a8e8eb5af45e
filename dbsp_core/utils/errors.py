"""Errors that are the user's to mend: `UserError`, and `SettingError`, which knows the setting at fault.

The lowest package defines the first, so that every package can raise it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from dbsp_kernels.errors import UserError

__all__ = ["ERROR", "NOTICE", "SettingError", "UserError", "bad_value", "blame_setting", "exit_with", "require_value"]

NOTICE = "dbsp: "
"""Before a line that a rank has for the user."""
ERROR = NOTICE + "error: "
"""Before the line that names a user's mistake."""


class SettingError(UserError):
    """A setting that cannot be.

    path: its keys, from the outermost on, as seen by who checks it. All but the last may be missing: what is wrong may
          be that nothing was given. Where several settings don't go together, one of them
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path

    def within(self, key: object) -> SettingError:
        """The same, seen from one level further out."""
        return SettingError(str(self), (str(key), *self.path))


def bad_value(settings: object, name: str, complaint: str, section: str = "") -> SettingError:
    """An error about one attribute of `settings`: "NAME=VALUE COMPLAINT". section: for the message, before the name"""
    value = getattr(settings, name)
    return SettingError(f"{section}{name}={list(value) if isinstance(value, tuple) else value} {complaint}", (name,))


def require_value(settings: object, name: str, fits: bool, complaint: str, section: str = "") -> None:
    """Raises what `bad_value` makes unless the attribute fits."""
    if not fits:
        raise bad_value(settings, name, complaint, section)


@contextmanager
def blame_setting(key: object) -> Iterator[None]:
    """What is wrong inside is the setting `key`, or a setting in it."""
    try:
        yield
    except SettingError as error:
        raise error.within(key) from error
    except UserError as error:
        raise SettingError(str(error), (str(key),)) from error


def exit_with(error: UserError) -> NoReturn:
    """One line for a user's mistake, and exit code 2."""
    sys.stderr.write(f"{ERROR}{error}\n")
    sys.stderr.flush()
    raise SystemExit(2) from error
