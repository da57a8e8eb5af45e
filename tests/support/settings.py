"""Configurations and sessions for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.runtime.session import AttentionSession


def with_debug(settings: Mapping[str, Any], debug: bool = True) -> DbspConfig:
    """Returns settings as they are read where $DBSP_DEBUG is set, or is not."""
    return replace(DbspConfig.load(settings), debug=debug)


def session_of(settings: Any, strategy: str, heads: int, layers: int = 1) -> AttentionSession:
    """Returns this rank's session in the default group."""
    parsed = Strategy.parse(strategy)
    return AttentionSession(DbspConfig.load(settings), SequenceGroup.from_group(), parsed, heads, layers)
