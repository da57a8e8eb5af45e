"""A process leaves nothing running: no thread of a group that was torn down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SINGLE_RANK = """
import gc, os
import torch
import torch.distributed as dist

def threads():
    return len(os.listdir("/proc/self/task"))

torch.ones(2) @ torch.ones(2)  # starts torch's own
before = threads()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""

LEFT = """
dist.destroy_process_group()
gc.collect()
print(threads() - before)
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts a process's threads as Linux shows them")
class TestGroups:
    def test_groups_next_to_a_destroyed_one_leave_no_thread(self):
        used = """
from dbsp_core.comm.groups import SequenceGroup

world = SequenceGroup.from_group()
world.control().all_gather(torch.zeros(1))
assert world.control() == world.control() != world
world.auxiliary("reports").barrier()
del world
"""
        done = run(SINGLE_RANK + used + LEFT)
        assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]

    def test_a_group_that_is_held_does(self):
        """The count above can fail: a group next to another that somebody holds keeps its threads."""
        done = run(SINGLE_RANK + "held = dist.new_group([0], backend='gloo')\n" + LEFT)
        assert int(done.stdout) > 0, done.stderr[-2000:]
