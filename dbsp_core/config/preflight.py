"""What can be said of a configuration and a checkpoint before any rank is started, or any weight loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.models.lookup import find_model_spec
from dbsp_core.models.spec import ModelSpec
from dbsp_core.models.video import VideoSettings
from dbsp_core.utils.errors import SettingError, UserError, blame_setting
from dbsp_kernels import choose_kernel

__all__ = ["dense_complaint", "duration_notice", "memory_complaint", "require_checkpoint", "require_possible"]

_ANSWER_S = 10.0
_WEIGHTS = re.compile(r"(diffusion_pytorch_model|model)(-\d+-of-\d+)?\.safetensors")
"""The files that pipelines load; others are variants of them."""
_HOUR = 3600.0


def require_possible(config: DbspConfig) -> None:
    """Raises SettingError for settings that cannot be served on this machine, or with these masks."""
    with blame_setting("kernel"):
        choose_kernel(config.kernel, _device(), config.generate.torch_dtype)
    if config.cost_model is not None:
        with blame_setting("cost_model"):
            load_hardware(config.cost_model)
    if config.effective_layout == "learned" and config.mask.changes != "never":
        kind = type(config.mask).__name__.removesuffix("Source").lower()
        message = (
            f"layout 'learned' needs masks that are known beforehand, those of source {kind} are not; use striped"
        )
        raise SettingError(message, ("layout",))


def require_checkpoint(model: str | None) -> None:
    """Raises UserError for a repository that is neither in the cache nor to be had; None and a folder: nothing."""
    if model is None or Path(model).is_dir() or _in_cache(model) is not None:
        return
    from huggingface_hub import HfApi, constants

    try:
        HfApi().model_info(model, timeout=_ANSWER_S)
    except Exception as error:  # of whichever library answers for the network
        reason = (str(error).strip(" .\n").splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"checkpoint {model} is not in {constants.HF_HUB_CACHE}, and {constants.ENDPOINT} does not give it "
            f"({reason}); download it where there is a network (hf download {model}) and give its folder with "
            "--model, or name the cache that has it with HF_HUB_CACHE"
        ) from error


def memory_complaint(model: str, dtype: torch.dtype, processes: int) -> str | None:
    """Why a checkpoint's weights cannot fit into this machine's memory, with the figures, or None.

    Every process holds all weights: of its GPU's memory, or of the machine's. Counted from the files where they are
    here, else known of published models.
    """
    folder, spec = Path(model) if Path(model).is_dir() else _in_cache(model), find_model_spec(model)
    numbers = max(sum(_numbers_in(folder)) if folder else 0, spec.parameters if spec else 0)
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


def duration_notice(spec: ModelSpec | None, video: VideoSettings, processes: int) -> str | None:
    """That a published model is about to run on CPUs for more than an hour; None where it is not. Modelled."""
    if spec is None or torch.accelerator.is_available():
        return None
    run = replace(spec, video=video, paper_thw=None)
    rate = load_hardware("cpu-demo").constants.linear_flops_per_s * processes
    seconds = run.calls * run.linear_flops / rate
    if seconds < _HOUR:
        return None
    long = f"{seconds / _HOUR / 24:,.0f} days" if seconds > 48 * _HOUR else f"{seconds / _HOUR:.0f} hours"
    return (
        f"there is no GPU: {spec.name} on {processes} process{'es' if processes > 1 else ''} of this CPU will take "
        f"{long} or more (modelled); --config tiny-wan-trained is for trying out"
    )


def dense_complaint(config: DbspConfig, steps: int | None) -> str | None:
    """That the schedule leaves nothing to sparse attention, or None. steps: of the denoising"""
    schedule = config.dense_schedule
    if steps is None or schedule.first_steps + schedule.last_steps < steps:
        return None
    return (
        f"dense_schedule makes all {steps} steps dense (first_steps {schedule.first_steps}, last_steps "
        f"{schedule.last_steps}): nothing will be gained; lower them, or take more steps (video.steps)"
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _in_cache(repository: str) -> Path | None:
    """Its folder in Hugging Face's cache, whole or not."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository, "model_index.json")
    except (ImportError, ValueError):  # not a name of a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def _numbers_in(folder: Path) -> Iterator[int]:
    """How many numbers each file of weights of a pipeline holds, as its header says."""
    for path in folder.glob("*/*.safetensors"):
        if _WEIGHTS.fullmatch(path.name):
            with path.open("rb") as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            yield sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")


def _machine_memory() -> int | None:
    """Bytes that processes here can have: of the machine, or of the container that limits them; None: not known."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total = sum(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return total
