"""How the unmodified `xdit` command learns db-SP's flags.

xfuser has no plugin entry points, but torch has: it calls every function in the entry-point group `torch.backends`
when it is imported. This one looks whether the process is an xfuser run and if so installs the patches before xfuser's
modules are imported; in a run with db-SP, torchrun ends with `xdit`, and ranks with their torchrun, however that came
about. Anywhere else it does nothing. DBSP_AUTOLOAD=0 turns it off; `dbsp-xdit` does without it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["autoload", "dbsp_requested", "is_xfuser_run", "is_xfusers_torchrun"]

_MODULES = ("xfuser.runner", "xfuser.cli")


def autoload() -> None:
    """Called by torch at the end of its import. Never raises: torch must stay importable whatever happens here."""
    launching, running = is_xfusers_torchrun(sys.orig_argv), is_xfuser_run(sys.orig_argv)
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0" or not (launching or running):
        return
    ours = dbsp_requested(sys.orig_argv)
    try:
        if ours and (launching or "RANK" in os.environ):
            from dbsp_start.parents import end_with_parent

            end_with_parent(by=signal.SIGTERM if launching else signal.SIGKILL)
        if running:
            from dbsp_xdit.patches import install

            install(active=ours)
    except Exception as error:
        # by no logger: loading one may be what failed
        print(f"dbsp: not loaded into this xfuser run: {type(error).__name__}: {error}", file=sys.stderr)


def is_xfuser_run(orig_argv: Sequence[str]) -> bool:
    """Whether a command line is `xdit …` or `python -m xfuser.runner …`; torchrun's own process is not."""
    for index, argument in enumerate(orig_argv[1:], start=1):
        if argument == "-m":
            return index + 1 < len(orig_argv) and orig_argv[index + 1] in _MODULES
        if not argument.startswith("-"):
            return os.path.basename(argument) in ("xdit", "xdit.exe")
    return False


def is_xfusers_torchrun(orig_argv: Sequence[str]) -> bool:
    """Whether a command line is `python -m torch.distributed.run … -m xfuser.runner …`, which `xdit` starts."""
    modules = [module for flag, module in pairwise(orig_argv) if flag == "-m"][:2]
    return modules == ["torch.distributed.run", "xfuser.runner"]


def dbsp_requested(argv: Sequence[str]) -> bool:
    """Whether a command line names a backend other than "usp": "dbsp", or a misspelling to be told about."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    backends = [value for name, value in pairwise(words) if name.replace("_", "-") == "--sp-backend"]
    return bool(backends) and backends[-1] != "usp"
