"""A process leaves nothing running: no thread of a group that was torn down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, os
import torch
import torch.distributed as dist
from dbsp_core.comm.groups import SequenceGroup

def threads():
    return len(os.listdir("/proc/self/task"))

def begin():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def left():
    dist.destroy_process_group()
    gc.collect()
    return threads() - before

torch.ones(2) @ torch.ones(2)  # starts torch's own
before = threads()
begin()
world = SequenceGroup.from_group()
world.control().all_gather(torch.zeros(1))
assert world.control() == world.control() != world
world.auxiliary("reports").barrier()
del world
print(left())
begin()
held = dist.new_group([0], backend="gloo")
print(left())
del held
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts a process's threads as Linux shows them")
def test_groups_leave_no_thread_once_their_group_is_destroyed():
    """Shows also that the count can fail: a group that is held keeps its threads."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    destroyed, held = map(int, done.stdout.split())
    assert destroyed == 0
    assert held > 0
