"""Teaches the unmodified `xdit` command db-SP's flags, from `dbsp_cli.autoload`.

In an xfuser run the patches are installed before xfuser's modules are imported; in a run with db-SP, torchrun also
ends when `xdit` does, and ranks when their torchrun does. A user's own script that is given the flags fails with what
to call instead. In any other process nothing happens.
"""

from __future__ import annotations

import os
import signal
import sys

from dbsp_xdit.command_line import RUNNER, dbsp_requested, is_xfuser_run, is_xfusers_torchrun, program

__all__ = ["autoload"]


def autoload() -> None:
    """Prepares this process if it is an xfuser run. Never raises: torch must stay importable."""
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
    """True where torchrun started this process as a rank of xfuser's. RANK proves nothing: pods may export it."""
    return program(sys.orig_argv)[0] == RUNNER and "TORCHELASTIC_RUN_ID" in os.environ
