"""How much memory is free on a device, or, for CPUs, on the host."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["free_memory"]

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process could still take; None where that is not known.

    Of an NVIDIA GPU: what is free on it, and what torch holds there without using it. Of a CPU: what the whole host,
    or the container that limits it, has left, which processes share.
    """
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + reserved
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        most, used = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        return min(free, most - used)
    except (OSError, ValueError):  # no container, or "max"
        return free
