"""The end of a program that runs as one of several ranks: after a failure at once, without waiting for other ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from dbsp_diffusers.rank_program import process_group
from tests.support.programs import Program

PRIORITY = "TORCH_NCCL_HIGH_PRIORITY"
SAFETY_NET_S = 240  # ends a hang; the process group's own timeout is longer
BEGIN = """
import sys, threading, torch, torch.distributed as dist
from datetime import timedelta
from dbsp_diffusers import rank_program
from dbsp_cli.entry import fast_exit
from dbsp_diffusers.rank_program import process_group
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import exit_on_user_error

def join(rank=0, world=1):
    store = dist.FileStore(sys.argv[1], world)
    return process_group(torch.device("cpu"), store=store, rank=rank, world_size=world, timeout=timedelta(hours=1))
"""
RANK_IN_A_COLLECTIVE = """
def collective():
    dist.all_reduce(torch.ones(1))

rank = int(sys.argv[2])
with fast_exit(), join(rank, 2), exit_on_user_error():
    dist.barrier()
    if rank == 0:
        collective()
    else:
        raise UserError('a mistake')
"""
OVER_NCCL = """
done = []
rank_program.over_nccl = lambda: True
rank_program._PATIENCE_S = 0.1
rank_program.distributed_c10d._abort_process_group = lambda: ({aborts}, print("aborted", flush=True))
rank_program.dist.destroy_process_group = lambda: print("destroyed", flush=True)
"""


def start(script: str, *arguments: object) -> Program:
    return Program(
        [sys.executable, "-c", BEGIN + script, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def ended(process: Program) -> tuple[int, str, str]:
    """Returns exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=SAFETY_NET_S)
    finally:
        process.kill()
    return process.returncode, out, err


def test_all_ranks_end_when_one_fails(tmp_path):
    ranks = [start(RANK_IN_A_COLLECTIVE, tmp_path / "store", rank) for rank in range(2)]
    (waiting, _, _), (failing, _, err) = [ended(rank) for rank in ranks]
    assert (failing, waiting) == (2, 1), err
    assert err.count("dbsp: error: a mistake") == 1


FAILS = "with fast_exit(), join():\n    raise ValueError('a fault')\n"
CAUGHT = "try:\n    with join():\n        1 / 0\nexcept ZeroDivisionError:\n    print('raised')\n"
SUCCEEDS = "with fast_exit(), join():\n    print('done', flush=True)\n"


@pytest.mark.parametrize(
    ("body", "aborts", "code", "written", "last"),
    [
        (FAILS, "threading.Event().wait()", 1, "", "ValueError: a fault\n"),
        (CAUGHT, "None", 0, "aborted\nraised\n", ""),
        (SUCCEEDS, "None", 0, "done\ndestroyed\n", ""),
    ],
    ids=["failure, abort hangs", "failure caught outside", "success"],
)
def test_nccl_is_aborted_after_a_failure_and_destroyed_after_a_success(tmp_path, body, aborts, code, written, last):
    found, out, err = ended(start(OVER_NCCL.format(aborts=aborts) + body, tmp_path / "store"))
    assert (found, out) == (code, written), err
    assert err.endswith(last)


@pytest.mark.parametrize(
    ("device", "of_user", "set_to"), [("cuda", None, "1"), ("cuda", "0", "0"), ("cpu", None, None)], ids=str
)
def test_nccl_gets_streams_of_high_priority_unless_the_user_says_otherwise(monkeypatch, device, of_user, set_to):
    """The variable has to be set before the first communicator is made."""
    monkeypatch.setattr(os, "environ", {} if of_user is None else {PRIORITY: of_user})
    seen = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args: seen.append(os.environ.get(PRIORITY)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    with process_group(torch.device(device)):
        pass
    assert seen == [set_to]
