"""examples/server.py on two CPU ranks with the tiny model: errors of one rank before, in and after the exchanges."""

from __future__ import annotations

import json
import os
import runpy
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
import torch
from diffusers import WanPipeline

import dbsp_diffusers
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

    def errors(self) -> str:
        return "\n".join(log.read_text() for log in self.folder.rglob("stderr.log"))

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
            try:
                assert self.get("health")[0] == 200
            except OSError:
                time.sleep(0.2)
            else:
                return
        raise AssertionError(self.errors()[-3000:])

    def video(self, request: dict[str, Any]) -> np.ndarray:
        status, answer = self.get("generate", request)
        assert status == 200, (answer, self.errors()[-3000:])
        return np.load(f"{answer['video']}.npy")


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


def of_one_process(client: Client, request: dict[str, Any]) -> np.ndarray:
    example = runpy.run_path(str(EXAMPLE))
    pipe = WanPipeline.from_pretrained(client.folder / "tiny", torch_dtype=torch.float32)
    dbsp_diffusers.enable(pipe, example["MASK"])
    return pipe(**example["prepare"](pipe, request)).frames[0]


def test_requests_follow_one_another_and_those_that_failed_on_one_rank(client):
    expected = {request["prompt"]: of_one_process(client, request) for request in (BALL, SMALL)}

    def assert_exact() -> None:
        for request in (BALL, SMALL):
            assert np.abs(client.video(request) - expected[request["prompt"]]).max() < 1e-4

    assert_exact()
    for fault in ("fails before the call", "fails in decoding"):
        failed = client.get("generate", BALL | {"prompt": fault})
        assert failed == (500, {"error": "RuntimeError: out of memory"})
        assert_exact()
    for wrong, said in (
        ({"height": 50}, "divisible by 16"),
        ({"frames": 5}, "unknown frames"),
        ({"seed": "x"}, "ValueError"),
    ):
        status, answer = client.get("generate", BALL | wrong)
        assert status == 500
        assert said in answer["error"]
    assert client.get("generate", "no object")[0] == 400
    assert_exact()
    assert "attempt_1" not in {path.name for path in client.folder.rglob("attempt_*")}, "nothing was started again"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["fails in denoising", "hangs"])
def test_rank_that_leaves_a_call_or_hangs_is_ended_by_the_time_limit_and_all_start_again(client, fault):
    expected = client.video(BALL)
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        client.get("generate", BALL | {"prompt": fault})
    client.wait()
    assert "attempt_1" in {path.name for path in client.folder.rglob("attempt_*")}
    assert np.abs(client.video(BALL) - expected).max() < 1e-4
