"""Configurations for tests: with the checks of $DBSP_DEBUG, on the ranks that ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dbsp_core.config import DbspConfig


def with_debug(settings: Mapping[str, Any], debug: bool = True) -> DbspConfig:
    """Returns settings as they are read where $DBSP_DEBUG is set, or is not."""
    return replace(DbspConfig.load(settings), debug=debug)
