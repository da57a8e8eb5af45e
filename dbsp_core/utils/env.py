"""Environment variables: db-SP's that the core reads (docs/configuration.md lists all), and launchers' numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["RECORD", "RECORD_EVERY", "RECORD_LAYERS", "RECORD_LIMIT", "number", "read"]

RECORD = "DBSP_RECORD"
"""Folder for the masks of a run, where the configuration names none."""
RECORD_EVERY = "DBSP_RECORD_EVERY"
"""Distance of denoising steps that are recorded: with 3, every third."""
RECORD_LAYERS = "DBSP_RECORD_LAYERS"
"""The layers that are recorded, such as "0,5,10-12"."""
RECORD_LIMIT = "DBSP_RECORD_LIMIT"
"""Most bytes that a recording may take on disk, such as "2GiB"."""


def read(name: str) -> str | None:
    """The variable's value, or None if it is missing or empty."""
    return os.environ.get(name) or None


def number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """A launcher's variable, such as WORLD_SIZE; None if it is missing, or no whole number of at most nine digits."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None
