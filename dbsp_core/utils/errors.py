"""Errors with their fix for the user, and fingerprints by which ranks compare."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from dbsp_kernels.errors import UserError

__all__ = [
    "REMOVED_KEYS",
    "REMOVED_VALUES",
    "SettingError",
    "UserError",
    "blame_setting",
    "cut_short",
    "did_you_mean",
    "fingerprint_of",
    "in_number",
    "in_short",
    "kind_of",
    "require_value",
    "why_removed",
]


def kind_of(value: object) -> str:
    """Returns the type of a value for a message, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_LONGEST = 200


def in_short(value: object) -> str:
    """Returns a value's `repr` for a message; of a long one the beginning and the length."""
    return cut_short(repr(value))


def in_number(number: int, noun: str) -> str:
    """Returns "1 rank" or "2 ranks"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


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


def require_value(settings: object, name: str, fits: bool, message: str, section: str = "") -> None:
    """Raises SettingError "SECTIONNAME=VALUE MESSAGE" about one attribute of `settings`, unless it fits."""
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
    """Turns a UserError inside into a SettingError about `key`, or about a setting within it.

    A traceback shows the new error and the cause of the old one, if it had one, but not the old error itself, whose
    message is the same.
    """
    try:
        yield
    except UserError as error:
        within = error.path if isinstance(error, SettingError) else ()
        raise SettingError(str(error), (str(key), *within)) from error.__cause__


def fingerprint_of(value: object) -> int:
    """Returns 63 bits of the hash of a value's `repr`: equal for values that are written identically."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1


REMOVED_KEYS: dict[str, str] = {
    "balancer": "leave it out: KnapFormer's greedy always chooses the bags",
    "cost_model": "write machine: and the same name or file",
    "debug": "set the environment variable DBSP_DEBUG=1 on all ranks",
    "dtype": "write it in generate, as in generate: {dtype: float32}",
    "exchange": "write its precision by itself, as in precision: int8",
    "keys": "leave it out: each rank is sent the keys that it needs if the mask never changes, else all of its heads'",
    "layout": "leave it out: contiguous if the mask never changes, else the planner's",
    "planner.exchange_cost": "leave it out: planner dbsp puts balance first; planner contiguous moves nothing",
    "planner.memory_limit": "leave it out: use more GPUs, or a smaller video or batch, where memory is short",
    "planner.name": "write the name alone, as in planner: paper",
    "planner.paper": "leave it out: planner paper has the paper's reward of 1",
    "planner.target_rho": "leave it out: planner dbsp stops at 1.002",
    "pooled_keys": "leave it out: rows attend to the blocks that they keep, and skipped blocks have no mean keys",
    "record": "set the environment variable DBSP_RECORD=FOLDER, or run under `dbsp masks record FOLDER --`",
    "reuse.budget": "leave it out: plans are kept by reuse alone; a lower number asks for more plans",
    "reuse.mode": "leave it out: plans lag by one call for masks that are computed from queries and keys",
    "reuse.threshold": "write the number alone, as in reuse: 1.1",
    "video": "write its keys in generate, as in generate: {steps: 50}",
}
"""Keys that no longer exist, with the section for keys of sections that are now values, and what to do instead."""
REMOVED_VALUES: dict[tuple[str, str], str] = {
    ("source", "vllm_selector"): "sparge and sol choose blocks by means; for your own function write callable",
    ("layout", "learned"): "write striped, which is nearly as even, or leave it out",
    ("layout", "local"): "write contiguous; keys: needed cuts rows into runs of tokens",
    ("planner", "local"): "write planner: dbsp, which cuts rows into runs of tokens with keys: needed",
    ("planner", "knapsack"): "write planner: paper, whose heads are assigned by the same greedy rule",
    ("keys", "kept"): "write needed for masks that never change, for others all",
    ("keys", "auto"): "write needed for masks that never change, for others all",
    ("keys", "ring"): "write all: keys come in chunks from where they live",
}
"""Values that a setting or an argument no longer takes, and what to write instead."""


def why_removed(key: object, value: object = None) -> str | None:
    """Returns what to say of a removed key, or of a key's removed value; None for one that was never there."""
    advice = REMOVED_KEYS.get(str(key)) if value is None else REMOVED_VALUES.get((str(key), str(value)))
    shown = key if value is None else f"{key}: {value}"
    return f"{shown} was removed; {advice}" if advice else None
