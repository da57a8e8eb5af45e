"""How the unmodified `xdit` command learns db-SP's flags: `autoload`, which is called when torch has been imported.

It looks whether the process is an xfuser run and if so installs the patches before xfuser's modules are imported; in a
run with db-SP, torchrun ends with `xdit`, and ranks with their torchrun, however that came about. A script of the
user's that is given the flags is told what to call. Anywhere else it does nothing. `dbsp-xdit` does without it.
"""

from __future__ import annotations

import os
import signal
import sys

from dbsp_start.command_line import RUNNER, dbsp_requested, is_xfuser_run, is_xfusers_torchrun, program

__all__ = ["autoload"]


def autoload() -> None:
    """Never raises: torch must stay importable whatever happens here. DBSP_AUTOLOAD=0 turns it off."""
    if os.environ.get("DBSP_AUTOLOAD", "1") == "0":
        return
    launching, running = is_xfusers_torchrun(sys.orig_argv), is_xfuser_run(sys.orig_argv)
    ours = dbsp_requested(sys.orig_argv)
    try:
        if ours and (launching or _is_rank()):
            from dbsp_start.parents import end_with_parent

            end_with_parent(by=signal.SIGTERM if launching else signal.SIGKILL)
        if running:
            from dbsp_xdit.patches import install

            install(active=ours)
        elif ours and not launching:
            from dbsp_start.import_hook import after_import

            after_import({"xfuser.config.args": _refuse_in_script})
    except Exception as error:
        # by no logger: loading one may be what failed
        print(f"dbsp: not loaded into this xfuser run: {type(error).__name__}: {error}", file=sys.stderr)


def _refuse_in_script(_: object) -> None:
    from dbsp_xdit.patches import install

    install(active=False, script=True)


def _is_rank() -> bool:
    """Whether torchrun started this process as one of xfuser's ranks. RANK alone says nothing: pods may export it."""
    return program(sys.orig_argv)[0] == RUNNER and "TORCHELASTIC_RUN_ID" in os.environ
