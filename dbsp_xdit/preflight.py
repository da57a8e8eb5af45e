"""Finds a user's mistakes before any process is launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbsp_core.config.config import DbspConfig
from dbsp_core.utils.paths import require_folder_place
from dbsp_xdit.flags import config_from, parse_known
from dbsp_xdit.models import Model, find_model, require_fit

__all__ = ["preflight", "settings_of"]


def preflight(argv: Sequence[str]) -> None:
    """Raises ValueError for what is wrong with an xdit command line that asks for db-SP; quiet otherwise."""
    if "-h" in argv or "--help" in argv:
        return
    args = parse_known(argv)
    settings = settings_of(args)
    if settings is not None and settings[0].report and args["nnodes"] == "1":  # of several, one writes it
        require_folder_place(Path(settings[0].report).absolute(), "--sp-report" if args["sp_report"] else "report")


def settings_of(args: Mapping[str, Any]) -> tuple[DbspConfig, Model | None] | None:
    """The configuration and the model that a run's arguments ask for; None for backend "usp".

    args: xfuser's, by name; without a model, which xfuser then asks for, there is none
    Raises ValueError, in one line, for arguments that make no sense.
    """
    config = config_from(args)
    if config is None:
        return None
    if args.get("model") is None:
        return config, None
    model = find_model(args["model"])
    require_fit(model, args)
    return config, model
