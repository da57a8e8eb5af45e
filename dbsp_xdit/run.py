"""The `dbsp-xdit` command: xdit's arguments, backend "dbsp" unless another is asked for.

In every rank, torchrun runs this module: xfuser's runner with db-SP in it, which needs no autoloading.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from typing import NoReturn

from dbsp_core.comm.rank_program import exit_on_failure
from dbsp_core.utils.errors import exit_on_user_error
from dbsp_core.utils.packages import require_packages
from dbsp_diffusers.preflight import require_checkpoint
from dbsp_start.module import module_command
from dbsp_start.parents import LAUNCHER
from dbsp_xdit import NEEDS
from dbsp_xdit.command_line import BACKEND, dbsp_requested, full_name
from dbsp_xdit.models import preflight
from dbsp_xdit.patches import install

__all__ = ["main"]


def main() -> NoReturn:
    """Checks the arguments, then replaces this process by torchrun."""
    argv = sys.argv[1:]
    if not any(full_name(argument.split("=")[0]) == BACKEND for argument in argv):
        argv = ["--sp_backend", "dbsp", *argv]
    with exit_on_user_error():
        require_packages("dbsp-xdit", NEEDS, "xdit")
        require_checkpoint(preflight(argv))
    install(active=dbsp_requested(argv))  # xfuser.cli cannot be imported without an accelerator otherwise
    from xfuser.cli import extract_torchrun_args, get_nproc_from_args

    torchrun, runner_args = extract_torchrun_args(argv)
    processes = torchrun.pop("--nproc_per_node") or get_nproc_from_args(runner_args)
    options = [f"{name}={value}" for name, value in torchrun.items()]
    rank = module_command("dbsp_start.rank", "dbsp_xdit.run", *runner_args)
    os.environ[LAUNCHER] = str(os.getpid())
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by nohup, which torchrun would ignore
        os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGQUIT")
    os.environ["PYTHONSAFEPATH"] = "1"  # for processes that ranks start
    command = module_command("torch.distributed.run", f"--nproc_per_node={processes}", *options, *rank)
    os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    install(active=dbsp_requested(sys.argv))
    with exit_on_failure():
        runpy.run_module("xfuser.runner", run_name="__main__", alter_sys=True)
