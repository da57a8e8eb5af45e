"""The function that torch calls once it has been imported, so that unmodified programs find db-SP.

xfuser and para-attn have no plugin entry points, but torch calls every function in the entry-point group
`torch.backends`. This one imports next to nothing, and acts only on `xdit … --sp-backend` and on
para-attn's adapters.
"""

from __future__ import annotations

import importlib
import os
import sys

from dbsp_cli.import_hook import after_import
from dbsp_xdit.autoload import autoload as for_xdit


def autoload() -> None:
    """Does nothing where DBSP_AUTOLOAD=0. Never raises: torch must stay importable."""
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0":
        return
    for_xdit(after_import)
    after_import({"para_attn.context_parallel.diffusers_adapters": _teach_para_attn})


def _teach_para_attn(_: object) -> None:
    """Imports dbsp_para, which installs it; `dbsp_para.uninstall()` undoes that."""
    try:
        importlib.import_module("dbsp_para")
    except Exception as error:
        print(f"dbsp: para-attn does not learn attn: {type(error).__name__}: {error}", file=sys.stderr)
