"""xfuser's runner with db-SP in it, for torchrun: `python -m dbsp_xdit.runner …`. Needs no autoloading."""

from __future__ import annotations

import runpy
import sys

from dbsp_xdit.autoload import wants_dbsp
from dbsp_xdit.seams import install

if __name__ == "__main__":
    install(active=wants_dbsp(sys.argv))
    runpy.run_module("xfuser.runner", run_name="__main__", alter_sys=True)
