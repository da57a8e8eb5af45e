"""A video server on several GPUs: torchrun --nproc_per_node 8 --max-restarts 100 server.py --port 8000 --timeout 120

    curl localhost:8000/generate -d '{"prompt": "a red ball bounces over a blue checkered floor", "seed": 1}'
    curl localhost:8000/health

Rank 0 takes the requests. All ranks agree before each call of the pipeline, and after it; docs/serving.md says why.
"""

import argparse
import json
import os
import queue
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from diffusers import WanPipeline
from diffusers.utils import export_to_video

import dbsp_diffusers

gpu = torch.cuda.is_available()
if gpu:
    MODEL, MASK = "Wan-AI/Wan2.1-T2V-14B-Diffusers", "sparge:cdf=0.92"
    SIZE = {"height": 720, "width": 1280, "num_frames": 81, "num_inference_steps": 50}
else:  # to try it: first `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, MASK = "tiny", "sparge:cdf=0.85,similarity=-1,block_q=16,block_k=16"
    SIZE = {"height": 144, "width": 240, "num_frames": 33, "num_inference_steps": 12}


class Frontend(BaseHTTPRequestHandler):
    """HTTP on rank 0: threads of their own put jobs into the queue, and wait."""

    jobs: queue.Queue[SimpleNamespace] = queue.Queue()
    turn = time.monotonic()  # when the ranks met last

    @classmethod
    def next_job(cls, seconds: float) -> SimpleNamespace | None:
        """Returns the next job, or None if there is none for some seconds."""
        cls.turn = time.monotonic()
        try:
            return cls.jobs.get(timeout=seconds)
        except queue.Empty:
            return None

    def do_GET(self) -> None:
        self.reply(200, {"seconds": round(time.monotonic() - self.turn), "waiting": self.jobs.qsize()})

    def do_POST(self) -> None:
        try:
            request = dict(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        except (ValueError, TypeError) as error:
            return self.reply(400, {"error": f"the request is not a JSON object: {error}"})
        job = SimpleNamespace(request=request, done=threading.Event())
        self.jobs.put(job)
        job.done.wait()
        self.reply(job.status, job.answer)

    def reply(self, status: int, answer: dict[str, Any]) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode() + b"\n")


@torch.no_grad()
def prepare(pipe: WanPipeline, request: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of the pipeline's call. What may fail on one rank alone belongs here."""
    texts = {name: str(request.get(name, "")) for name in ("prompt", "negative_prompt")}
    numbers = {name: int(request.get(name, value)) for name, value in SIZE.items()}
    if unknown := set(request) - {*texts, *numbers, "seed"}:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}; choose from {', '.join([*texts, *numbers, 'seed'])}")
    positive, negative = pipe.encode_prompt(**texts, device=pipe._execution_device)
    generator = torch.Generator().manual_seed(int(request.get("seed", 0)))
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "generator": generator, **numbers}


def make(pipe: WanPipeline, arguments: dict[str, Any]) -> str:
    """Makes a video on all ranks, and writes it on rank 0. Returns its path."""
    path, video = str(Path(f"{uuid.uuid4()}.mp4").resolve()), pipe(**arguments).frames[0]
    return export_to_video(video, path, fps=16) if dist.get_rank() == 0 else path


def together(control: dist.ProcessGroup, function: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """Calls a function on all ranks. Returns its result, and the error of each rank, "" where there is none."""
    result, error = None, ""
    try:
        result = function(*args)
    except Exception as problem:  # any: the other ranks must be told
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=control)
    return result, errors


def usable(errors: list[str]) -> bool:
    """Returns True if the ranks are at one place after a call: some finished it, or all have the same mistake."""
    if any(error.startswith("CommunicationError") for error in errors):
        return False
    return "" in errors or (len({*errors}) == 1 and errors[0].startswith(("UserError", "ValueError", "TypeError")))


def serve(pipe: WanPipeline, control: dist.ProcessGroup, timeout: float) -> None:
    """Makes one video after another. Raises where the processes have to be started again."""
    while True:
        # 1. All ranks get the request from rank 0, or None before they have waited too long.
        job = Frontend.next_job(timeout / 4) if dist.get_rank() == 0 else None
        message = [job.request if job else None]
        dist.broadcast_object_list(message, src=0, group=control)
        if message[0] is None:
            continue
        # 2. All prepare it, and none calls the pipeline unless all can.
        arguments, errors = together(control, prepare, pipe, message[0])
        # 3. All call it. A rank that fails alone meets the others after the call, or after the time limit.
        if not any(errors):
            path, errors = together(control, make, pipe, arguments)
            if not usable(errors):
                raise RuntimeError(f"the ranks stopped at different places of a call: {errors}")
        # 4. Rank 0 answers.
        if job:
            failed = next(filter(None, errors), "")
            job.status, job.answer = (500, {"error": failed}) if failed else (200, {"video": path})
            job.done.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=120, help="seconds that ranks wait for one another, at most")
    options = parser.parse_args()
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    limit = timedelta(seconds=options.timeout)
    pipe = WanPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16 if gpu else torch.float32)
    store, rank, world = next(dist.rendezvous("env://"))  # torchrun's, with what it held before a restart
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=limit)
    control = dist.new_group(backend="gloo", timeout=limit)
    dbsp_diffusers.enable(pipe.to("cuda" if gpu else "cpu"), MASK)
    if rank == 0:
        http = ThreadingHTTPServer(("localhost", options.port), Frontend)
        threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        serve(pipe, control, options.timeout)
    except Exception:
        traceback.print_exc()
    os._exit(1)  # at once: NCCL would wait for the other ranks, and torchrun ends and restarts them


if __name__ == "__main__":
    main()
