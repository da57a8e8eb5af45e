"""Accesses that compute-sanitizer finds, a static call captured in a CUDA graph, and peak memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import torch

from dbsp_core.utils.files import in_bytes
from scripts.checks.gpu.results import Case, Key, Row, Skipped
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.steady import SteadyCall, masks
from scripts.checks.gpu.suite import REPO

FOUND = 99  # exit status of the sanitizer if it has found something
WATCHED = (Key("kernels", "forward, 120×120, D 128, bfloat16"), Key("kernels", "segments, D 128, bfloat16"))


def cases(setting: Setting) -> Iterator[Case]:
    for key in WATCHED:
        yield Case(f"compute-sanitizer, {key.case}", partial(sanitized, setting, key), limit_s=120)
    yield Case("a captured graph of a static call", partial(captured, setting))
    for strategy in setting.strategies:
        yield Case(f"peak memory, {strategy}", partial(peak_memory, setting, strategy))


def sanitized(setting: Setting, key: Key) -> Iterator[Row]:
    """Runs another case under compute-sanitizer."""
    folders = os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"])
    tool = shutil.which("compute-sanitizer", path=folders)
    if setting.dry or tool is None:
        raise Skipped("no GPU" if setting.dry else "compute-sanitizer is not here")
    command = [tool, "--tool", "memcheck", "--error-exitcode", str(FOUND), sys.executable, "-m"]
    command += [
        "scripts.checks.gpu.worker",
        "--parts",
        f"{key.part}=scripts.checks.gpu.{key.part}:cases",
        "--case",
        *key,
    ]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-20_000:])
    if done.returncode not in (0, FOUND):
        raise Skipped(f"the tool ended with status {done.returncode}: {done.stdout.strip().splitlines()[-1:]}")
    yield Row("wrong accesses were found", float(done.returncode == FOUND), "", 0.0)


@torch.no_grad()
def captured(setting: Setting) -> Iterator[Row]:
    """Captures one attention in a CUDA graph, replays it with other inputs, and compares bits with a plain call."""
    if setting.dry:
        raise Skipped("no GPU")
    call = SteadyCall(setting, setting.small, f"U{setting.world}R1", masks(setting)["static"])
    call()
    call.begin()
    call.attend()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call.attend()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.attend()
    call.q.copy_(torch.randn_like(call.q))
    graph.replay()
    expected = call.attend()
    yield Row("numbers that differ from a plain call", float((out != expected).sum()), "", 0.0)
    ms = setting.sampler.medians({"graph": lambda i: graph.replay(), "plain": lambda i: call.attend()})
    yield Row("graph / plain, on the device", ms["graph"] / ms["plain"])
    yield Row("a replay, on the host", setting.sampler.cpu_ms(lambda i: graph.replay()), "ms")
    call.session.end()


@torch.no_grad()
def peak_memory(setting: Setting, strategy: str) -> Iterator[Row]:
    """Compares the peak of a steady call beyond its inputs with the size of q."""
    if setting.dry:
        raise Skipped("no GPU")
    call = SteadyCall(setting, setting.large, strategy, masks(setting)["static"])
    for _warm_up in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    yield Row(f"peak / q's {in_bytes(call.q.nbytes)}", peak / call.q.nbytes)
    yield Row("peak", peak / 2**20, "MiB")
