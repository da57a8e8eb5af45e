"""Checks, before weights are loaded, whether this machine has the memory for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

from dbsp_core.models.table import find_model_spec


def memory_message(model: str, dtype: torch.dtype, processes: int) -> str | None:
    """Returns why a checkpoint's weights cannot fit into this machine's memory, with the figures, or None.

    Every process holds all weights: of its GPU's memory, or of the machine's. Counted from the files if they are
    here, else known of published models.
    """
    from dbsp_diffusers.checkpoint import numbers_in  # here: it takes seconds to import
    from dbsp_diffusers.preflight import local_checkpoint

    checkpoint, spec = local_checkpoint(model), find_model_spec(model)
    numbers = max(sum(map(numbers_in, checkpoint.weights())) if checkpoint else 0, spec.parameters if spec else 0)
    where, there = "this machine, swap included,", _machine_memory()
    if torch.cuda.is_available():
        where, there, processes = "the GPU", torch.cuda.get_device_properties(0).total_memory, 1
    size = numbers * dtype.itemsize
    if there is None or size * processes <= there:
        return None
    held = f"the weights of {model} are"
    if processes > 1:
        held = f"{processes} processes hold the weights of {model}, each"
    name = str(dtype).removeprefix("torch.")
    return f"{held} {size / 2**30:.1f} GiB in {name}, and {where} has {there / 2**30:.1f} GiB of memory"


def _machine_memory() -> int | None:
    """Returns the bytes that processes here can have, of the machine or its container, or None if not known."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        total = sum(int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))
    except (OSError, KeyError, ValueError):
        return None
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8")))
    except (OSError, ValueError):  # no container, or "max"
        return total
