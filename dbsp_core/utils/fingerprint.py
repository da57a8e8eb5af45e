"""Numbers by which ranks compare values."""

from __future__ import annotations

import hashlib

__all__ = ["fingerprint_of"]


def fingerprint_of(value: object) -> int:
    """63 bits of the hash of a value's `repr`: equal for values that are written alike."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "big") >> 1
