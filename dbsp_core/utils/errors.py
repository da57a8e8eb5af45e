"""Setting errors, text for messages, and fingerprints for comparing ranks."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dbsp_kernels.errors import UserError


def kind_of(value: object) -> str:
    """Returns the type of a value for a message, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def in_short(value: object) -> str:
    """Returns a value's `repr` for a message, shortened by `cut_short`."""
    return cut_short(repr(value))


def cut_short(text: str) -> str:
    """Shortens text of more than 200 characters to its beginning and length."""
    return text if len(text) <= 200 else f"{text[:100]}… ({len(text):,} characters)"


def in_number(number: int, noun: str) -> str:
    """Returns "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class SettingError(UserError):
    """A wrong or missing setting, or settings that do not fit together; `path` has its keys, outermost first."""

    def __init__(self, message: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.path = path


def require_value(settings: object, name: str, fits: bool, message: str, section: str = "") -> None:
    """Raises SettingError "SECTIONNAME=VALUE MESSAGE" about an attribute of `settings`, unless it fits."""
    if not fits:
        value = getattr(settings, name)
        shown = cut_short(str(list(value) if isinstance(value, tuple) else value))
        raise SettingError(f"{section}{name}={shown} {message}", (name,))


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Returns the end of a message, such as "; did you mean 'sparge'?"; empty if no known word is close."""
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


@contextmanager
def blame_setting(key: object) -> Iterator[None]:
    """Turns a UserError in the body into a SettingError about `key`, or about a setting within it.

    The traceback omits the original error, whose message is equal, but keeps its cause.
    """
    try:
        yield
    except UserError as error:
        within = error.path if isinstance(error, SettingError) else ()
        raise SettingError(str(error), (str(key), *within)) from error.__cause__


def fingerprint_of(value: object) -> int:
    """Returns a 63-bit hash of a value's `repr`."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
