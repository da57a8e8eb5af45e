"""A video server on several GPUs: torchrun --nproc_per_node 8 --max-restarts 100 server.py --port 8000 --timeout 120

    curl localhost:8000/generate -H 'Content-Type: application/json' -d '{"prompt": "a red ball bounces", "seed": 1}'
    curl localhost:8000/videos/NAME.mp4 --output ball.mp4

Rank 0 takes the requests. All ranks agree before, in and after each call of the pipeline; docs/serving.md says why.
"""

import argparse
import asyncio
import os
import signal
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from diffusers import WanPipeline
from diffusers.utils import export_to_video
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

import dbsp_diffusers

gpu = torch.cuda.is_available()
if gpu:
    MODEL, CONFIG = "Wan-AI/Wan2.1-T2V-14B-Diffusers", None  # None: the settings shipped for this checkpoint
    HEIGHT, WIDTH, FRAMES, STEPS = 720, 1280, 81, 50
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:  # to try it: first `dbsp tiny wan-trained tiny`, then torchrun --nproc_per_node 2
    MODEL, CONFIG = "tiny", "tiny-wan-trained"
    HEIGHT, WIDTH, FRAMES, STEPS = 144, 240, 33, 12
VIDEOS, MOST_WAITING, STOPPING = Path("videos"), 16, "the server is stopping"


class VideoRequest(BaseModel, extra="forbid"):  # anything else gets 422; set the ranges to what fits your GPUs
    prompt: str = Field(min_length=1, max_length=4000)
    negative_prompt: str = Field("", max_length=4000)
    height: int = Field(HEIGHT, ge=16, le=1280, multiple_of=16)
    width: int = Field(WIDTH, ge=16, le=1280, multiple_of=16)
    num_frames: int = Field(FRAMES, ge=1, le=161)
    num_inference_steps: int = Field(STEPS, ge=1, le=100)
    guidance_scale: float = Field(5.0, ge=1, le=20)
    seed: int = Field(0, ge=0, lt=2**63)


@dataclass
class Job:
    request: dict[str, Any]
    disconnected: bool = False  # the client
    answer: JSONResponse | None = None


VIDEOS.mkdir(exist_ok=True)
app = FastAPI()
app.mount("/videos", StaticFiles(directory=VIDEOS))
state = app.state  # of rank 0: uvicorn's thread adds jobs, the main thread takes them
state.jobs, state.job, state.stopping = deque(), None, False  # jobs that wait; the one that runs; SIGTERM was received
state.began = state.met = 0.0  # when that job began, and when all ranks were last at one place (time.monotonic)


@app.post("/generate")
async def generate(video: VideoRequest, connection: Request) -> JSONResponse:
    if len(state.jobs) >= MOST_WAITING:
        raise HTTPException(429, f"{MOST_WAITING} requests are waiting; try again later")
    state.jobs.append(job := Job(video.model_dump()))
    while job.answer is None:
        if state.stopping and job is not state.job:
            raise HTTPException(503, STOPPING)
        await asyncio.sleep(0.05)
        job.disconnected = await connection.is_disconnected()
    return job.answer


@app.get("/health")
async def health() -> JSONResponse:
    stuck = time.monotonic() - state.met > state.timeout  # the ranks have not met
    name = "stuck" if stuck else "stopping" if state.stopping else "generating" if state.job else "idle"
    seconds = round(time.monotonic() - state.began) if state.job else 0
    answer = {"state": name, "seconds": seconds, "waiting": len(state.jobs)}
    return JSONResponse(answer, 503 if stuck or state.stopping else 200)


def prepare(pipe: WanPipeline, request: dict[str, Any]) -> dict[str, Any]:
    """Returns arguments of the pipeline's call. What may fail on one rank alone belongs here."""
    texts = {name: request.pop(name) for name in ("prompt", "negative_prompt")}
    positive, negative = pipe.encode_prompt(**texts, device=pipe._execution_device, max_sequence_length=512)
    generator = torch.Generator().manual_seed(request.pop("seed"))
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "generator": generator, **request}


def make(pipe: WanPipeline, arguments: dict[str, Any]) -> str:
    """Makes a video on all ranks, and writes it on rank 0. Returns its path."""
    path, video = str(VIDEOS / f"{uuid.uuid4()}.mp4"), pipe(**arguments).frames[0]
    return export_to_video(video, path, fps=16) if dist.get_rank() == 0 else path


def broadcast(message: Any, control: dist.ProcessGroup) -> Any:
    """Returns rank 0's message on all ranks."""
    messages = [message]
    dist.broadcast_object_list(messages, src=0, group=control)
    state.met = time.monotonic()
    return messages[0]


@torch.no_grad()
def on_all_ranks(control: dist.ProcessGroup, function: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """Calls a function on all ranks. Returns its result, and the error of each rank, "" where there is none."""
    result, error = None, ""
    try:
        result = function(*arguments)
    except Exception as problem:  # any: the other ranks must be told
        traceback.print_exc()
        error = f"{type(problem).__name__}: {problem}"
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=control)
    return result, errors


def serve(pipe: WanPipeline, control: dist.ProcessGroup) -> None:
    """Makes one video after another until SIGTERM. Raises if the processes have to be started again."""

    def after_step(pipe: WanPipeline, step: int, timestep: torch.Tensor, tensors: dict[str, Any]) -> dict[str, Any]:
        gone = "the client disconnected" if job and job.disconnected else ""
        if reason := broadcast(STOPPING if state.stopping else gone, control):
            raise InterruptedError(reason)  # on all ranks, after the same step
        return tensors

    while True:
        # 1. All ranks get a request from rank 0, or None in short intervals, so that idle ranks don't time out.
        state.job, job = None, state.jobs.popleft() if state.jobs else None
        request = None if job is None or job.disconnected else job.request
        request = broadcast(STOPPING if state.stopping else request, control)
        if request == STOPPING:
            return
        if request is None:
            time.sleep(0.2)
            continue
        state.job, state.began = job, time.monotonic()
        # 2. All prepare it, and none calls the pipeline unless all can.
        arguments, errors = on_all_ranks(control, prepare, pipe, request)
        # 3. All call it. A rank that fails alone meets the others after the call, or after the time limit.
        if not any(errors):
            arguments["callback_on_step_end"] = after_step
            path, errors = on_all_ranks(control, make, pipe, arguments)
            broken = any(error.startswith("CommunicationError") for error in errors)
            mistake = errors[0].startswith(("UserError", "ValueError", "TypeError", "InterruptedError"))
            if broken or not ("" in errors or (mistake and len({*errors}) == 1)):  # all have it
                raise RuntimeError(f"the ranks stopped at different places of a call: {errors}")
        # 4. Rank 0 answers.
        if job:
            failed = JSONResponse({"error": max(errors)}, 503 if state.stopping else 500)
            job.answer = failed if any(errors) else JSONResponse({"video": f"/{path}"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="localhost", help="address to listen at; 0.0.0.0 for all")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--timeout", type=float, default=120, help="seconds that ranks wait for one another, at most")
    options = parser.parse_args()
    state.timeout, is_first = options.timeout, os.environ["RANK"] == "0"
    if is_first:  # before the weights load, so that a port in use is an error at once
        config = uvicorn.Config(app, options.host, options.port, log_level="warning", timeout_graceful_shutdown=5)
        http, listener = uvicorn.Server(config), config.bind_socket()
    limit, dtype = timedelta(seconds=options.timeout), torch.bfloat16 if gpu else torch.float32
    pipe = WanPipeline.from_pretrained(MODEL, torch_dtype={"default": dtype, "vae": torch.float32})
    store, rank, world = next(dist.rendezvous("env://"))  # torchrun's, with what it held before a restart
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=world, timeout=limit)
    control = dist.new_group(backend="gloo", timeout=limit)
    dbsp_diffusers.enable(pipe.to("cuda" if gpu else "cpu"), CONFIG)
    # torchrun sends SIGTERM to all ranks: rank 0 stops the others, after a step.
    signal.signal(signal.SIGTERM, (lambda *_: setattr(state, "stopping", True)) if is_first else signal.SIG_IGN)
    if is_first:
        (thread := threading.Thread(target=http.run, args=([listener],), daemon=True)).start()
    try:
        serve(pipe, control)
    except Exception:
        traceback.print_exc()
        os._exit(1)  # at once: NCCL would wait for the other ranks, and torchrun ends and restarts them
    if is_first:
        http.should_exit = True
        thread.join()
    os._exit(0)


if __name__ == "__main__":
    main()
