"""Function that torch calls after its import, so that unmodified programs find db-SP.

xfuser and para-attn have no plug-in entry points, but torch calls every function in the entry-point group
`torch.backends`. This one imports almost nothing, and acts only on `xdit …` with db-SP's flags or `--help`, and on
para-attn's adapters.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from dbsp_xdit.import_hook import after_import


def autoload() -> None:
    """Does nothing if DBSP_AUTOLOAD=0. Never raises, since torch must stay importable."""
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0":
        return
    if requested(sys.orig_argv, len(getattr(sys, "argv", ()))):
        try:
            importlib.import_module("dbsp_xdit.runner").install()
        except Exception as error:  # not logged, since loading the logger may have failed
            print(f"dbsp: not loaded into this xfuser run: {type(error).__name__}: {error}", file=sys.stderr)
    after_import({"para_attn.context_parallel.diffusers_adapters": _teach_para_attn})


def _teach_para_attn(_: object) -> None:
    """Imports dbsp_para, which installs itself; `dbsp_para.uninstall()` undoes it."""
    try:
        importlib.import_module("dbsp_para")
    except Exception as error:
        print(f"dbsp: not loaded into para-attn: {type(error).__name__}: {error}", file=sys.stderr)


def requested(command: Sequence[str], words: int) -> bool:
    """Returns True for `xdit …` or `python -m xfuser.runner …` with a flag of db-SP or `--help`.

    The last `words` of the command line are the program (a script or `-m`'s module) and its arguments.
    """
    program, *arguments = command[len(command) - words :] or [""]
    is_xfuser = program.endswith(("xfuser.runner", "xfuser.cli")) or os.path.basename(program) in ("xdit", "xdit.exe")
    flags = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return is_xfuser and any(flag.startswith("--sp-") or flag in ("--help", "-h") for flag in flags)
