"""examples/server.py on two CPU ranks with the tiny model: errors of one rank before, in and after the exchanges."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.support.ports import free_port
from tests.support.programs import Program
from tests.support.programs.server import descendants
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "server.py"
FAULTY = '''"""The server, whose last rank has faults that prompts name; it saves arrays in place of videos."""
import os, sys, time
import diffusers, numpy as np
import server

prompts, prepare = [""], server.prepare

def fails(fault):
    if os.environ["RANK"] == "1" and prompts[-1] == fault:
        if fault == "hangs":
            time.sleep(3600)
        raise RuntimeError("out of memory")

def prepared(pipe, request):
    prompts.append(request.get("prompt", ""))
    fails("fails before the call")
    return prepare(pipe, request)

def failing(stock, *faults):
    def call(*args, **options):
        for fault in faults:
            fails(fault)
        return stock(*args, **options)
    return call

server.prepare = prepared
server.export_to_video = lambda video, path, fps: np.save(path, video) or path
diffusers.AutoencoderKLWan.decode = failing(diffusers.AutoencoderKLWan.decode, "fails in decoding")
scheduler = diffusers.UniPCMultistepScheduler
scheduler.step = failing(scheduler.step, "fails in denoising", "hangs")
server.main()
'''
BALL = {"prompt": "ball", "seed": 3, "height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 2}
SMALL = BALL | {"prompt": "cube", "height": 48, "width": 64, "num_frames": 1}
TIMEOUT_S = 20
"""Of the server: more than two ranks of a busy machine are apart."""
PATIENCE_S = 300


class Client:
    """A server that runs on two ranks, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"http://localhost:{(port := free_port())}/"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
        logs = ["--redirects=3", f"--log-dir={folder / 'logs'}"]
        command = [sys.executable, *launch, *logs, "faulty.py", f"--port={port}", f"--timeout={TIMEOUT_S}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.program = Program(command, cwd=folder, env=environment, start_new_session=True)

    def get(self, path: str, body: object = None) -> tuple[int, Any]:
        """Returns status and answer of one request. Raises OSError if the server ends meanwhile."""
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.address + path, data, timeout=PATIENCE_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def wait(self) -> None:
        """Returns once the server answers."""
        until = time.monotonic() + PATIENCE_S
        while self.program.poll() is None and time.monotonic() < until:
            with suppress(OSError):
                assert self.get("health")[0] == 200
                return
            time.sleep(0.2)
        raise AssertionError("\n".join(log.read_text()[-3000:] for log in self.folder.rglob("stderr.log")))

    def video(self, request: dict[str, Any]) -> np.ndarray:
        status, answer = self.get("generate", request)
        assert status == 200, answer
        return np.load(f"{answer['video']}.npy")

    def attempts(self) -> set[str]:
        return {path.name for path in self.folder.rglob("attempt_*")}


@pytest.fixture
def client(tmp_path) -> Iterator[Client]:
    make_tiny("wan-trained", tmp_path / "tiny")
    (tmp_path / "server.py").write_text(EXAMPLE.read_text())
    (tmp_path / "faulty.py").write_text(FAULTY)
    client = Client(tmp_path)
    try:
        client.wait()
        yield client
    finally:
        for process in (client.program.pid, *descendants(client.program.pid)):  # ranks have sessions of their own
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        client.program.wait()


def test_requests_follow_one_another_and_those_that_failed_on_one_rank(client):
    expected = client.video(SMALL)
    assert client.video(BALL).shape[0] == BALL["num_frames"]
    for request, status, said in (
        (BALL | {"prompt": "fails before the call"}, 500, "RuntimeError: out of memory"),
        (BALL | {"prompt": "fails in decoding"}, 500, "RuntimeError: out of memory"),
        (BALL | {"height": 50}, 500, "divisible by 16"),
        (BALL | {"frames": 5}, 500, "unknown frames"),
        ("no object", 400, "not a JSON object"),
    ):
        found, answer = client.get("generate", request)
        assert found == status
        assert said in answer["error"]
        assert np.abs(client.video(SMALL) - expected).max() < 1e-4
    assert "attempt_1" not in client.attempts(), "nothing was started again"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["fails in denoising", "hangs"])
def test_rank_that_leaves_a_call_or_hangs_is_ended_by_the_time_limit_and_all_start_again(client, fault):
    expected = client.video(BALL)
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        client.get("generate", BALL | {"prompt": fault})
    client.wait()
    assert "attempt_1" in client.attempts()
    assert np.abs(client.video(BALL) - expected).max() < 1e-4
