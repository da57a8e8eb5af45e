"""Amounts of memory as text."""

from __future__ import annotations

import re

from dbsp_core.utils.errors import UserError

__all__ = ["in_bytes", "parse_size"]

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}iB": 2 ** (10 * power) for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate("KMGT", 1)}


def parse_size(text: str) -> int:
    """Bytes from "2GiB", "500 MB" or a plain number. Raises UserError for anything else."""
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise UserError(f"size {text!r} is not of the form '2GiB'; units are {', '.join(u for u in _UNITS if u)}")
    return int(float(found[1]) * _UNITS[found[2]])


def in_bytes(count: float) -> str:
    """A number of bytes as text, such as "512 B" or "1.25 MiB"."""
    amount, unit = float(count), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(amount) < 1024:
            break
        amount, unit = amount / 1024, bigger
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.3g} {unit}" if amount < 1000 else f"{amount:.0f} {unit}"
