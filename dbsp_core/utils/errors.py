"""A user's mistakes: `UserError`, which the lowest package defines, and `SettingError`, which names the setting."""

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
    "cut_short",
    "did_you_mean",
    "exit_on_user_error",
    "in_short",
    "kind_of",
    "require_value",
]


def kind_of(value: object) -> str:
    """The type of a value for a message, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_LONGEST = 200


def in_short(value: object) -> str:
    """A value's `repr` for a message; of a long one the beginning and the length."""
    return cut_short(repr(value))


def cut_short(text: str) -> str:
    """Returns a text for a message; of a long one the beginning and the length."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}… ({len(text):,} characters)"


class SettingError(UserError):
    """A mistake in a setting.

    Attributes:
        path: The setting's keys, outermost first, from where it is checked. The setting may be missing, as that can be
            the mistake. Where several settings don't go together, it is one of them.
    """

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path

    def within(self, key: object) -> SettingError:
        """The same error with `key` as outermost key."""
        return SettingError(str(self), (str(key), *self.path))


def bad_value(settings: object, name: str, complaint: str, section: str = "") -> SettingError:
    """An error "SECTIONNAME=VALUE COMPLAINT" about one attribute of `settings`."""
    value = getattr(settings, name)
    shown = cut_short(str(list(value) if isinstance(value, tuple) else value))
    return SettingError(f"{section}{name}={shown} {complaint}", (name,))


def require_value(settings: object, name: str, fits: bool, complaint: str, section: str = "") -> None:
    """Raises a `bad_value` unless the attribute fits."""
    if not fits:
        raise bad_value(settings, name, complaint, section)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The end of a message, such as "; did you mean 'sparge'?"; empty if no known word is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def blame_setting(key: object) -> Iterator[None]:
    """Turns a UserError inside into a SettingError about `key`, or about a setting within it.

    A traceback shows the new error and the cause of the old one, if it had one, but not the old error itself, whose
    message is the same.
    """
    try:
        yield
    except SettingError as error:
        raise error.within(key) from error.__cause__
    except UserError as error:
        raise SettingError(str(error), (str(key),)) from error.__cause__


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError inside into one line and exit code 2. Also a decorator."""
    try:
        yield
    except UserError as error:
        log.error(error)
        raise SystemExit(2) from error
