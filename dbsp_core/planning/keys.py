"""The ways for keys to travel, by name."""

from __future__ import annotations

from dbsp_core.planning.key_chunks import AllKeys, NeededKeys
from dbsp_core.planning.key_travel import KeyTravel, RingKeys
from dbsp_core.utils.errors import UserError, did_you_mean

__all__ = ["KEYS", "require_keys"]

KEYS: dict[str, type[KeyTravel]] = {way.name: way for way in (RingKeys, AllKeys, NeededKeys)}
"""The ways for keys to travel, by the value of setting `keys`."""
REMOVED = {
    "kept": "for masks predicted at every call write keys: all or ring, for others needed",
    "auto": "name the way: keys: ring, all, or needed for masks that are known beforehand",
}
"""Former values of setting `keys`, and what to write instead."""


def require_keys(keys: str) -> type[KeyTravel]:
    """Returns the way of that name. Raises UserError for a value that is not one of `KEYS`."""
    if keys in REMOVED:
        raise UserError(f"keys: {keys} was removed; {REMOVED[keys]}")
    if keys not in KEYS:
        raise UserError(f"keys cannot be {keys!r}; use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS))
    return KEYS[keys]
