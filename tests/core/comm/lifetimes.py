"""Process groups of a worker that live on once torch has destroyed them, for what is still in scope."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def left_alive(rank: int, world: int, folder: str, use: Callable[..., Any], *args: Any) -> tuple[int, list[str]]:
    """Holds what use(*args) returns while all groups are destroyed, in a default group of its own.

    returns: how many groups there were; the names of those that live on. Afterwards the worker has a group again.
    """
    dist.destroy_process_group()
    _begin(f"{folder}/own", rank, world)
    try:
        held = use(*args)
        groups = [(weakref.ref(group), group.group_name) for group in distributed_c10d._world.pg_map]
        dist.destroy_process_group()
        gc.collect()
        left = [name for group, name in groups if group() is not None]
        del held
        return len(groups), left
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _begin(f"{folder}/afterwards", rank, world)


def _begin(store: str, rank: int, world: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
