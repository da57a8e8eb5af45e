"""examples/server.py on two CPU ranks with the tiny model: sizes at once, bad requests, faults of a rank, its end."""

from __future__ import annotations

import http.client
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
from tests.support.programs.program import end_with_descendants
from tests.support.repository import ROOT

EXAMPLE = ROOT / "examples" / "server.py"
FAULTY = '''"""The server, whose last rank has faults that prompts name; it saves arrays in place of videos."""
import os, sys, time
import diffusers, numpy as np
import server

prompts, prepare, leave = [""], server.prepare, os._exit

def fails(fault):
    if prompts[-1] == "is slow":
        time.sleep(0.2)
    if os.environ["RANK"] == "1" and prompts[-1] == fault:
        if fault == "hangs":
            time.sleep(3600)
        raise RuntimeError("out of memory")

def prepared(pipe, request):
    prompts.append(request["prompt"])
    fails("fails before the call")
    return prepare(pipe, request)

def failing(stock, *faults):
    def call(*args, **options):
        for fault in faults:
            fails(fault)
        return stock(*args, **options)
    return call

def left(code):
    with open("codes", "a") as file:
        file.write(str(code))
    leave(code)

def save(video, path, fps):
    with open(path, "wb") as file:
        np.save(file, video)
    return path

server.prepare, server.export_to_video, server.MOST_WAITING, os._exit = prepared, save, 3, left
diffusers.AutoencoderKLWan.decode = failing(diffusers.AutoencoderKLWan.decode, "fails in decoding")
scheduler = diffusers.UniPCMultistepScheduler
scheduler.step = failing(scheduler.step, "fails in denoising", "hangs")
server.main()
'''
BALL = {"prompt": "ball", "seed": 3, "height": 64, "width": 96, "num_frames": 5, "num_inference_steps": 2}
SMALL = BALL | {"prompt": "cube", "height": 48, "width": 64, "num_frames": 1}
WIDE = BALL | {"width": 112, "negative_prompt": "blue", "guidance_scale": 2.5, "num_inference_steps": 1}
SLOW = SMALL | {"prompt": "is slow", "num_inference_steps": 100}
TIMEOUT_S = 20
"""Of the server: more than two ranks of a busy machine are apart."""
PATIENCE_S = 300


class Client:
    """A server that runs on two ranks, and requests to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=2"]
        logs = ["--redirects=3", f"--log-dir={folder / 'logs'}"]
        command = [sys.executable, *launch, *logs, "faulty.py", f"--port={self.port}", f"--timeout={TIMEOUT_S}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self.program = Program(command, cwd=folder, env=environment, start_new_session=True)
        self.threads = ThreadPoolExecutor()

    def connect(self, path: str, body: object = None) -> http.client.HTTPConnection:
        """Sends a request. Raises OSError if there is no server."""
        connection = http.client.HTTPConnection("localhost", self.port, timeout=PATIENCE_S)
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def get(self, path: str, body: object = None) -> tuple[int, Any]:
        """Returns status and answer of one request. Raises OSError if the server ends meanwhile."""
        response = self.connect(path, body).getresponse()
        content = response.read()
        return response.status, json.loads(content) if "json" in response.headers["Content-Type"] else content

    def health(self) -> dict[str, Any]:
        """Returns what the server says about itself, and "nothing" if it does not answer."""
        with suppress(OSError, http.client.HTTPException):
            status, answer = self.get("/health")
            assert status == (503 if answer["state"] in ("stuck", "stopping") else 200)
            return answer
        return {"state": "nothing"}

    def wait_until(self, **expected: object) -> None:
        """Returns once the server's health has these values."""
        until = time.monotonic() + PATIENCE_S
        while self.program.poll() is None and time.monotonic() < until:
            if expected.items() <= self.health().items():
                return
            time.sleep(0.1)
        raise AssertionError("\n".join(log.read_text()[-3000:] for log in self.folder.rglob("stderr.log")))

    def ask(self, request: dict[str, Any]) -> Future[tuple[int, Any]]:
        """Sends a request for a video from a thread."""
        return self.threads.submit(self.get, "/generate", request)

    def video(self, request: dict[str, Any]) -> np.ndarray:
        """Returns the frames of a request."""
        status, answer = self.get("/generate", request)
        assert status == 200, answer
        status, content = self.get(answer["video"])
        assert status == 200
        return np.load(io.BytesIO(content))

    def codes(self) -> str:
        """Returns the exit code of each rank that has ended."""
        file = self.folder / "codes"
        return file.read_text() if file.exists() else ""

    def close(self) -> None:
        end_with_descendants(self.program.pid)
        self.program.wait()
        self.threads.shutdown()


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[[], Client]]:
    """Makes start() give a server of its own."""
    clients: list[Client] = []

    def start() -> Client:
        folder = tmp_path_factory.mktemp("server")
        make_tiny("wan-trained", folder / "tiny")
        (folder / "server.py").write_text(EXAMPLE.read_text())
        (folder / "faulty.py").write_text(FAULTY)
        clients.append(Client(folder))
        clients[-1].wait_until(state="idle")
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def client(start) -> Client:
    """A server that the last of the tests here ends."""
    return start()


@pytest.fixture(scope="module")
def single_process(tmp_path_factory) -> Callable[[dict[str, Any]], np.ndarray]:
    """Makes single_process(request) give the frames that the pipeline makes here."""
    folder = tmp_path_factory.mktemp("single") / "tiny"
    make_tiny("wan-trained", folder)
    pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    dbsp_diffusers.enable(pipe, "tiny-wan-trained")

    def make(request: dict[str, Any]) -> np.ndarray:
        rest = {name: value for name, value in request.items() if name != "seed"}
        return pipe(**rest, generator=torch.Generator().manual_seed(request["seed"])).frames[0]

    return make


def test_requests_of_several_sizes_at_once(client, single_process):
    requests = (BALL, SMALL, WIDE)
    for request, video in zip(requests, client.threads.map(client.video, requests), strict=True):
        expected = single_process(request)
        assert video.shape == expected.shape
        assert np.abs(video - expected).max() < 1e-4, request


@pytest.mark.parametrize(
    "change",
    [
        {"height": 50},
        {"seed": "x"},
        {"prompt": ""},
        {"frames": 5},
    ],
    ids=str,
)
def test_a_bad_request_reaches_no_rank(client, change):
    status, answer = client.get("/generate", BALL | change)
    assert status == 422
    assert answer["detail"][0]["loc"] == ["body", *change]


def test_a_request_that_fails_on_one_rank_fails_alone(client):
    expected = client.video(SMALL)
    for fault in ("fails before the call", "fails in decoding"):
        assert client.get("/generate", BALL | {"prompt": fault}) == (500, {"error": "RuntimeError: out of memory"})
        assert np.array_equal(client.video(SMALL), expected)
    assert client.codes() == "", "nothing was started again"
    assert client.get("/videos/..%2fserver.py")[0] == client.get("/videos/none.mp4")[0] == 404


def test_a_full_queue_and_a_client_that_disconnects(client):
    slow = client.connect("/generate", SLOW)
    client.wait_until(state="generating", waiting=0)
    gone = client.connect("/generate", SLOW)
    waiting = [client.ask(SMALL), client.ask(BALL)]
    client.wait_until(state="generating", waiting=3)
    assert client.get("/generate", SMALL)[0] == 429
    gone.close()
    slow.close()
    assert [request.result()[0] for request in waiting] == [200, 200]
    assert client.codes() == ""


def test_sigterm_gives_up_the_request_and_ends_all_ranks(client):
    running = client.ask(SLOW)
    client.wait_until(state="generating", waiting=0)
    waiting = client.ask(SMALL)
    client.wait_until(state="generating", waiting=1)
    client.program.send_signal(signal.SIGTERM)
    assert running.result() == (503, {"error": "InterruptedError: the server is stopping"})
    assert waiting.result() == (503, {"detail": "the server is stopping"})
    client.program.wait(PATIENCE_S)
    assert client.codes() == "00"


@pytest.mark.long
@pytest.mark.parametrize("fault", ["fails in denoising", "hangs"])
def test_rank_that_leaves_a_call_or_hangs_is_ended_by_the_time_limit_and_all_start_again(start, fault):
    client = start()
    expected = client.video(BALL)
    broken = client.ask(BALL | {"prompt": fault})
    if fault == "hangs":
        client.wait_until(state="stuck")
    with pytest.raises((OSError, http.client.HTTPException)):
        broken.result()
    client.wait_until(state="idle")
    assert set(client.codes()) == {"1"}
    assert np.array_equal(client.video(BALL), expected)
