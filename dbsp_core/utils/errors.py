"""Errors that are the user's to mend: `UserError`, and `SettingError`, which knows the setting at fault.

The lowest package defines the first, so that every package can raise it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dbsp_core.utils.log import log
from dbsp_kernels.errors import UserError

__all__ = [
    "SettingError",
    "UserError",
    "bad_value",
    "blame_setting",
    "did_you_mean",
    "exit_on_user_error",
    "in_short",
    "kind_of",
    "require_value",
]


def kind_of(value: object) -> str:
    """What a value is, for a message: "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_LONGEST = 200


def in_short(value: object) -> str:
    """A value as Python writes it, for a message; of a long one the beginning, and how long it is."""
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}… ({len(text):,} characters)"


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
    shown = _cut(str(list(value) if isinstance(value, tuple) else value))
    return SettingError(f"{section}{name}={shown} {complaint}", (name,))


def require_value(settings: object, name: str, fits: bool, complaint: str, section: str = "") -> None:
    """Raises what `bad_value` makes unless the attribute fits."""
    if not fits:
        raise bad_value(settings, name, complaint, section)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """What may have been meant, to end a message with: "; did you mean 'sparge'?", or nothing."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def blame_setting(key: object) -> Iterator[None]:
    """What is wrong inside is the setting `key`, or a setting in it."""
    try:
        yield
    except SettingError as error:
        raise error.within(key) from error
    except UserError as error:
        raise SettingError(str(error), (str(key),)) from error


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a user's error inside into one line and exit code 2. Also a decorator."""
    try:
        yield
    except UserError as error:
        log.error(error)
        raise SystemExit(2) from error
