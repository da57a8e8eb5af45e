"""Runs an engine's own Wan, tiny and random, on CPU ranks: cases in, their findings out.

A case is a dict with the fields of `Case`. What it found is {"error": largest difference from one process over all
outputs, "dense": how far dense attention is from it, "padding": number of tokens}, or {"rejected": the engine's own
error}.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LAYERS, STEPS = 3, 3
HEAD = 24  # size of a head
LONGEST_S = 900  # most seconds of a command; minutes of it are imports
LEAVE_OUT = "DBSP_LEAVE_OUT"
"""Set, LightX2V's plug-in of db-SP is not loaded; the other engines have a setting of their own for that."""
_STUBS = {
    "vllm_omni": ("vllm_omni.platform_plugins", "scripts.checks.engines.vllm_omni_platform:platform"),
    "lightx2v": ("lightx2v.platform_plugins", "scripts.checks.engines.lightx2v_stubs:register"),
}
"""Group and target of the entry point by which an engine finds a CPU, where it ships none."""
_ENVIRONMENT = {
    "vllm_omni": {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"},
    "sglang": {"SGLANG_LOGGING_LEVEL": "ERROR"},
    "lightx2v": {"PLATFORM": "cpu"},
}
_SEPARATE_REFERENCE = {"sglang"}
"""Engines whose models cannot run on one rank of several: a process of its own makes what they are compared with."""


@dataclass(frozen=True)
class Case:
    """One run of an engine's model."""

    heads: int  # of each layer
    sizes: tuple[tuple[int, int, int], ...]  # of the video one after another, in tokens
    mask: str | None  # or a YAML file of db-SP's settings; None: the engine's own dense attention
    pair: bool = False  # whether Wan2.2's two transformers take turns
    passes: int = 1  # of guidance in each step
    wrong: str | None = None  # another mask than the reference's, which must be seen
    strategy: str | None = None  # None: the engine's degrees
    cache: str | None = None  # the engine's step cache, by its name there
    cache_options: dict[str, Any] = field(default_factory=dict)  # by their names there
    unlike: bool = False  # whether ranks are made to decide differently what it skips
    compiled: bool = False  # by torch.compile, as the engine does it
    cfg_parallel: bool = False  # whether half of the ranks have each CFG pass
    tensor: int = 1  # degree of tensor parallelism; the other ranks share the sequence
    frames: bool = False  # whether a rank has frames of its own, where the engine also has runs of tokens
    model: str = "wan"  # which of the engine's models
    options: dict[str, Any] = field(default_factory=dict)  # of the engine, by their names there


def run(engine: str, ulysses: int, ring: int, *cases: Case, **environment: str) -> list[dict[str, Any]]:
    """Returns the findings of each case on ulysses · ring ranks. Raises RuntimeError with ranks' output."""
    module = f"scripts.checks.engines.{engine}_cases"
    with tempfile.TemporaryDirectory() as folder:
        settings = environment_of(engine, Path(folder)) | environment
        if cases[0].mask is not None:  # SGLang's plug-in looks at it when it is loaded
            settings.setdefault("DBSP_CONFIG", cases[0].mask)
        described = json.dumps([asdict(case) for case in cases])
        what = [str(ulysses), str(ring), described, str(Path(folder, "reference.pt"))]
        if engine in _SEPARATE_REFERENCE:
            alone = {name: value for name, value in settings.items() if name != "DBSP_CONFIG"}
            succeed([module, *what], alone, Path(folder))
        ranks = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(ulysses * ring), "-m", module]
        printed = succeed([*ranks, *what], settings, Path(folder))
    results = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("CASE ")]
    if len(results) != len(cases):
        raise RuntimeError(f"{len(cases)} cases were asked for, {len(results)} found:\n{printed}")
    return results


def cases_of(text: str) -> list[Case]:
    return [Case(**fields | {"sizes": tuple(map(tuple, fields["sizes"]))}) for fields in json.loads(text)]


def report(find: Callable[..., dict[str, Any]], *arguments: Any) -> None:
    """Prints on rank 0 what find(*arguments) returns, or the engine's own rejection, which every rank raises."""
    try:
        result = find(*arguments)
    except Exception as error:
        result = {"rejected": f"{type(error).__name__}: {error}"}
    if os.environ.get("RANK", "0") == "0":
        print("CASE " + json.dumps(result), flush=True)


def environment_of(engine: str, folder: Path) -> dict[str, str]:
    """Variables under which the engine finds its stub, whose entry point is put in `folder` as pip would."""
    if engine in _STUBS:
        group, target = _STUBS[engine]
        info = folder / "cpu_stub-0.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-stub\nVersion: 0.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(f"[{group}]\ncpu = {target}\n", encoding="utf-8")
    return os.environ | _ENVIRONMENT[engine] | {"PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}


def succeed(command: list[str], settings: dict[str, str], folder: Path) -> str:
    """Runs a module with its arguments, and returns its standard output. Raises RuntimeError if it fails."""
    with (
        (folder / "out.txt").open("w+", encoding="utf-8") as out,
        (folder / "err.txt").open("w+", encoding="utf-8") as err,
    ):
        started = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=out,
            stderr=err,
            env=settings,
            start_new_session=True,
        )
        try:
            ended = f"ended with {started.wait(LONGEST_S)}"
        except subprocess.TimeoutExpired:
            ended = f"did not end in {LONGEST_S} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # with the workers that it left
        out.seek(0)
        err.seek(0)
        said, of_ranks = out.read(), err.read().partition(".ChildFailedError")[0]
    if started.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} {ended}:\n{said[-8000:]}\n{of_ranks[-8000:]}")
    return said
