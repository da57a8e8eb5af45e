"""`python dbsp_start/module.py MODULE ARGUMENTS…` is `python -m MODULE ARGUMENTS…` without the current folder's files.

`python -m` looks for modules in the current folder first, so that a user's random.py would be imported in place of
Python's own. Python 3.10 has no option against that. The folders of PYTHONPATH still come first.
"""

from __future__ import annotations

import os
import sys

__all__ = ["module_command"]


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the arguments of Python, or of torchrun, that run a module so."""
    return [os.path.abspath(__file__), module, *arguments]


def _run() -> None:
    import runpy

    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if folder != own]
    if os.path.dirname(own) not in sys.path:
        sys.path.append(os.path.dirname(own))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _run()
