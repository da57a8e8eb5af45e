"""How long ranks wait for one another: `--timeout` is that of every process group, whoever makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.ports import free_port

SECONDS = "33"
ASK = """
import json, sys
import torch, torch.distributed as dist

def timeout(group):
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

def say(**groups):
    print(json.dumps({name: timeout(group) for name, group in groups.items()}))
"""
PARA = """
import dbsp_para.generate as host

def generate(config, video):
    from datetime import timedelta
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    own = dist.new_group(timeout=timedelta(seconds=7))
    say(main=dist.group.WORLD, another=dist.new_group(backend="gloo"), mesh=mesh.get_group("a"), own=own)

host.generate = generate
host.main(sys.argv[1:])
"""


def test_every_group_of_a_rank_has_the_timeout(tmp_path):
    pytest.importorskip("diffusers")
    config = tmp_path / "dbsp.yaml"
    config.write_text("generate: {prompt: x}\n")
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK + PARA, str(config), str(tmp_path / "video.mp4"), SECONDS],
        env=os.environ | place | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    timeouts = json.loads(done.stdout.splitlines()[-1])
    assert timeouts.pop("own", 7) == 7, "who gives one is heard"
    assert set(timeouts.values()) == {float(SECONDS)}, timeouts


def test_a_rank_that_never_comes_is_told_of_in_plain_words(tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys, dbsp_para.generate as host; host.main(sys.argv[1:])", "x", "y", "1"],
        env=os.environ | place | {"MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "one of the other ranks may have died, or was too late" in done.stderr.splitlines()[-1], done.stderr


@pytest.mark.parametrize("timeout", ["0", "-1", "nan"])
def test_a_timeout_that_is_none_is_refused(dbsp, timeout):
    code, _, err = dbsp("generate", "--config", "tiny-wan", "--prompt", "x", "--timeout", timeout)
    assert (code, err) == (2, f"dbsp: error: --timeout {timeout} must be above 0 seconds; 600 is usual\n")


def test_what_ranks_are_told(dbsp):
    asked = ("generate", "--config", "tiny-wan", "--prompt", "x", "--dry-run", "--json")
    for more, seconds in (((), "600"), (("--timeout", 90.5), "90.5")):
        assert json.loads(dbsp(*asked, *more)[1])["command"][-1] == seconds
