"""The environment variables of db-SP that the core reads; docs/configuration.md lists all.

Those of packages that load nothing of the core are named there: DBSP_KERNEL and DBSP_DEBUG in dbsp_kernels,
DBSP_AUTOLOAD in dbsp_cli.autoload, DBSP_LAUNCHER in dbsp_start, DBSP_RUN in dbsp_cli.
"""

from __future__ import annotations

import os

__all__ = ["RECORD", "RECORD_EVERY", "RECORD_LAYERS", "RECORD_LIMIT", "read"]

RECORD = "DBSP_RECORD"
"""Folder for the masks of a run, where the configuration names none."""
RECORD_EVERY = "DBSP_RECORD_EVERY"
"""n: each n-th denoising step is recorded."""
RECORD_LAYERS = "DBSP_RECORD_LAYERS"
"""The layers that are recorded, such as "0,5,10-12"."""
RECORD_LIMIT = "DBSP_RECORD_LIMIT"
"""Most bytes on disk, such as "2GiB"."""


def read(name: str) -> str | None:
    """The variable's value; an empty one counts as none."""
    return os.environ.get(name) or None
