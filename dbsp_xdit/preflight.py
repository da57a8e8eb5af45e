"""Finds a user's mistakes before any process is launched."""

from __future__ import annotations

from collections.abc import Sequence

from dbsp_xdit.flags import config_from, parse_known
from dbsp_xdit.models import require_model

__all__ = ["preflight"]


def preflight(argv: Sequence[str]) -> None:
    """Raises ValueError for what is wrong with an xdit command line that asks for db-SP; quiet otherwise."""
    if "-h" in argv or "--help" in argv:
        return
    args = parse_known(argv)
    if config_from(args) is not None and args["model"] is not None:
        require_model(args["model"])
