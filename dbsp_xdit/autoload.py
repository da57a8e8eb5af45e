"""How the unmodified `xdit` command learns db-SP's flags.

xfuser has no plugin entry points, but torch has: it calls every function in the entry-point group `torch.backends`
when it is imported. This one looks whether the process is an xfuser run and if so installs the seams before xfuser's
modules are imported. Anywhere else it does nothing. DBSP_AUTOLOAD=0 turns it off; `dbsp-xdit` does without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["autoload", "is_xfuser_run"]

_MODULES = ("xfuser.runner", "xfuser.cli")


def autoload() -> None:
    """Called by torch at the end of its import. Never raises: torch must stay importable whatever happens here."""
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0" or not is_xfuser_run(sys.orig_argv):
        return
    try:
        from dbsp_xdit.seams import install, wants_dbsp

        install(active=wants_dbsp(sys.orig_argv))
    except Exception as error:
        print(f"dbsp: not loaded into this xfuser run: {type(error).__name__}: {error}", file=sys.stderr)


def is_xfuser_run(orig_argv: Sequence[str]) -> bool:
    """Whether a command line is `xdit …` or `python -m xfuser.runner …`; torchrun's own process is not."""
    for index, argument in enumerate(orig_argv[1:], start=1):
        if argument == "-m":
            return index + 1 < len(orig_argv) and orig_argv[index + 1] in _MODULES
        if not argument.startswith("-"):
            return os.path.basename(argument) in ("xdit", "xdit.exe")
    return False
