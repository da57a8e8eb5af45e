"""The ways for keys to travel, by name."""

from __future__ import annotations

from dbsp_core.planning.kept_keys import KeptKeys
from dbsp_core.planning.key_chunks import AllKeys, NeededKeys
from dbsp_core.planning.key_travel import KeyTravel, RingKeys
from dbsp_core.utils.errors import UserError, did_you_mean

__all__ = ["KEYS", "require_keys"]

KEYS: dict[str, type[KeyTravel]] = {way.name: way for way in (RingKeys, AllKeys, NeededKeys, KeptKeys)}
"""The ways for keys to travel, by the value of setting `keys`."""


def require_keys(keys: str) -> type[KeyTravel]:
    """The way of that name. Raises UserError for what is not one of `KEYS`."""
    if keys not in KEYS:
        known = f"use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS)
        reason = "auto weighs predicted times, which sessions and dbsp simulate know; " if keys == "auto" else ""
        raise UserError(f"keys cannot be {keys!r} here: {reason}{known}")
    return KEYS[keys]
