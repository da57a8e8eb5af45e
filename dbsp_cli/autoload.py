"""What torch calls when it has been imported, so that unmodified programs learn of db-SP.

xfuser and para-attn have no plugin entry points, but torch has: it calls every function in the entry-point group
`torch.backends`. This one imports next to nothing, and acts on xfuser's runs and on para-attn's adapters alone.
"""

from __future__ import annotations

import importlib
import os
import sys

from dbsp_start.import_hook import after_import
from dbsp_xdit.autoload import autoload as for_xdit

__all__ = ["autoload"]


def autoload() -> None:
    """Never raises: torch must stay importable whatever happens here. DBSP_AUTOLOAD=0 turns it off."""
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0":
        return
    for_xdit()
    after_import({"para_attn.context_parallel.diffusers_adapters": _teach_para_attn})


def _teach_para_attn(_: object) -> None:
    """Importing dbsp_para does it, and `dbsp_para.uninstall()` undoes it."""
    try:
        importlib.import_module("dbsp_para")
    except Exception as error:
        print(f"dbsp: para-attn does not learn attn: {type(error).__name__}: {error}", file=sys.stderr)
