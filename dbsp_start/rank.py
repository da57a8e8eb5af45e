"""`dbsp_start.rank MODULE ARGUMENTS…`, run as a module, runs another as a rank, which ends with its torchrun."""

from __future__ import annotations

import os
import runpy
import sys

from dbsp_start.parents import LAUNCHER, end_with_parent
from dbsp_start.quick_end import quick_end

if __name__ == "__main__":
    end_with_parent(int(os.environ[LAUNCHER]) if LAUNCHER in os.environ else None)
    del sys.argv[0]
    with quick_end():
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
