"""How much memory is free on a device, or, for CPUs, on the host, and the limit that ranks agree on by it."""

from __future__ import annotations

from pathlib import Path

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.nodes import ranks_on_this_node
from dbsp_core.cost.peak_memory import MemoryLimit
from dbsp_core.utils.errors import UserError

__all__ = ["agree_on_memory", "free_memory"]

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
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        most, used = (int((_CGROUP / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        return min(free, most - used)
    except (OSError, ValueError):  # no container, or "max"
        return free


def agree_on_memory(limit: int | str | None, group: SequenceGroup, device: torch.device) -> MemoryLimit | None:
    """The memory that no rank's attention is to exceed, the same on all ranks.

    Args:
        limit: `planner.memory_limit`: bytes; "auto" for the least that is free on any rank now; None for no limit.
        group: The ranks, which gather what is free for "auto": it is a collective call then.
        device: Where attention runs. Of a CPU's free memory each of the host's ranks is given an even share.

    Raises:
        UserError: On all ranks, where one cannot tell how much is free.
    """
    if not isinstance(limit, str):
        return None if limit is None else MemoryLimit(limit)
    mine = free_memory(device)
    if mine is not None and device.type != "cuda":
        mine //= ranks_on_this_node() or group.size
    least = min(free for (free,) in group.gather_integers([-1 if mine is None else mine]))
    if least < 0:
        raise UserError(
            "planner.memory_limit: auto cannot tell how much memory is free here; write an amount, as 8GiB"
        )
    return MemoryLimit(least, free=True)
