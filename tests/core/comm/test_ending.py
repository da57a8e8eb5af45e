"""A process leaves nothing running: no thread of a group that was torn down, no job that the interpreter cuts off."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dbsp_core.comm.groups import CommunicationError
from dbsp_core.runtime.async_plan_cache import PlanningThread

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
    def test_groups_beside_a_destroyed_one_leave_no_thread(self):
        used = """
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.async_plan_cache import AsyncPlanCache

world = SequenceGroup.of()
world.control().all_gather(torch.zeros(1))
assert world.control() == world.control() != world
world.auxiliary("reports").barrier()
cache = AsyncPlanCache(group=world)
cache._thread.submit(lambda: world.control().all_gather(torch.zeros(1))).result()
del cache
del world
"""
        done = run(SINGLE_RANK + used + LEFT)
        assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr[-2000:]

    def test_a_group_that_is_held_does(self):
        """The count above can fail: a group beside another that somebody holds keeps its threads."""
        done = run(SINGLE_RANK + "held = dist.new_group([0], backend='gloo')\n" + LEFT)
        assert int(done.stdout) > 0, done.stderr[-2000:]


class TestBackground:
    def test_jobs_under_way_are_done_before_the_interpreter_ends(self):
        done = run(
            "import time\n"
            "from dbsp_core.runtime.async_plan_cache import PlanningThread\n"
            "background = PlanningThread()\n"
            "for number in range(3):\n"
            "    background.submit(lambda number=number: (time.sleep(0.1), print(number, flush=True)))\n"
        )
        assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2"]), done.stderr[-2000:]

    def test_its_thread_ends_with_it(self):
        background, running = PlanningThread(), set(threading.enumerate())
        background.submit(int).result()
        (thread,) = set(threading.enumerate()) - running
        del background
        gc.collect()
        thread.join(30)
        assert not thread.is_alive()

    def test_once_communication_has_broken_off_no_job_is_begun(self):
        def break_off():
            raise CommunicationError("a rank has gone")

        background, done = PlanningThread(), []
        first, second = background.submit(break_off), background.submit(lambda: done.append(1))
        for future in (first, second):
            with pytest.raises(CommunicationError, match="a rank has gone"):
                future.result()
        assert not done

    def test_any_other_fault_of_a_job_is_its_own(self):
        background = PlanningThread()
        first, second = background.submit(lambda: 1 // 0), background.submit(lambda: 2)
        with pytest.raises(ZeroDivisionError):
            first.result()
        assert second.result() == 2
