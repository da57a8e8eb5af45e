"""Checks, before a rank is started, whether this machine has the memory for a checkpoint, and the time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dbsp_core.cost.machine import load_hardware
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.models.table import ModelSpec, find_model_spec
from dbsp_core.utils.errors import UserError

__all__ = ["duration_notice", "linear_flops", "memory_complaint", "passes"]

_HOUR = 3600.0


def memory_complaint(model: str, dtype: torch.dtype, processes: int) -> str | None:
    """Why a checkpoint's weights cannot fit into this machine's memory, with the figures, or None.

    Every process holds all weights: of its GPU's memory, or of the machine's. Counted from the files where they are
    here, else known of published models.
    """
    from dbsp_diffusers.preflight import local_checkpoint  # here: it takes seconds to import

    checkpoint, spec = local_checkpoint(model), find_model_spec(model)
    numbers = max(sum(_numbers_in(checkpoint.weights())) if checkpoint else 0, spec.parameters if spec else 0)
    if torch.cuda.is_available():
        where, processes = "the GPU", 1
        there: int | None = torch.cuda.get_device_properties(0).total_memory
    else:
        where, there = "this machine, swap included,", _machine_memory()
    needed = numbers * dtype.itemsize * processes
    if there is None or needed <= there:
        return None
    times = (
        f"{processes} processes hold the weights of {model}, each" if processes > 1 else f"the weights of {model} are"
    )
    return (
        f"{times} {numbers * dtype.itemsize / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, and {where} has "
        f"{there / 2**30:.1f} GiB of memory"
    )


def duration_notice(spec: ModelSpec | None, video: GenerateSettings, processes: int) -> str | None:
    """That a published model is about to run on CPUs for more than an hour; None where it is not. Modelled."""
    if spec is None or torch.accelerator.is_available():
        return None
    run = replace(spec, video=video, paper_thw=None)
    rate = load_hardware("cpu-demo").constants.linear_flops_per_s * processes
    seconds = passes(run) * linear_flops(run) / rate
    if seconds < _HOUR:
        return None
    long = f"{seconds / _HOUR / 24:,.0f} days" if seconds > 48 * _HOUR else f"{seconds / _HOUR:.0f} hours"
    return (
        f"there is no GPU: {spec.name} on {processes} process{'es' if processes > 1 else ''} of this CPU will take "
        f"{long} or more (modelled); --config tiny-wan-trained is for trying out"
    )


def passes(spec: ModelSpec) -> int:
    """Forward passes of a model's usual video: two a step under classifier-free guidance, whose scale is over 1."""
    scales = (spec.video.guidance_scale, spec.video.guidance_scale_2)
    guided = any(scale is not None and scale > 1 for scale in scales)
    return (2 if guided else 1) * (spec.video.steps or 0)


def linear_flops(spec: ModelSpec) -> float:
    """FLOP of one forward pass but for self-attention's scores: projections, MLP, cross-attention.

    The keys and values of cross-attention's text are left out: 512 tokens beside tens of thousands.
    """
    projections = 4 * spec.width**2 + 2 * spec.width * spec.ffn
    if spec.cross_text:
        projections += 2 * spec.width**2 + 2 * spec.width * spec.cross_text
    return 2.0 * spec.layers * spec.tokens * projections


def _numbers_in(files: Iterable[Path]) -> Iterator[int]:
    """How many numbers each file of weights holds, as its header says.

    Raises:
        UserError: For a file that is none of weights: cut short, or Git LFS's stand-in for one.
    """
    for path in files:
        try:
            with safe_open(path, framework="numpy") as file:
                yield sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  no mapping
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read as weights ({error}); download it again") from error


def _machine_memory() -> int | None:
    """Bytes that processes here can have: of the machine, or of the container that limits them; None: not known."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total = sum(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    except (OSError, ValueError):  # no container, or "max"
        return total
