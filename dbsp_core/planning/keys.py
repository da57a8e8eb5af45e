"""The ways for keys to travel, by name."""

from __future__ import annotations

from dbsp_core.planning.key_chunks import AllKeys, NeededKeys
from dbsp_core.planning.key_travel import KeyTravel, RingKeys
from dbsp_core.utils.errors import UserError, did_you_mean
from dbsp_core.utils.removed import why_removed

__all__ = ["KEYS", "require_keys"]

KEYS: dict[str, type[KeyTravel]] = {way.name: way for way in (RingKeys, AllKeys, NeededKeys)}
"""The ways for keys to travel, by the value of setting `keys`."""


def require_keys(keys: str) -> type[KeyTravel]:
    """Returns the way of that name. Raises UserError for a value that is not one of `KEYS`."""
    if keys not in KEYS:
        unknown = f"keys cannot be {keys!r}; use one of {', '.join(KEYS)}" + did_you_mean(keys, KEYS)
        raise UserError(why_removed("keys", keys) or unknown)
    return KEYS[keys]
