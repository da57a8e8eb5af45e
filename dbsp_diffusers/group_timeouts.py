"""How long ranks wait for one another, in processes that db-SP starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

__all__ = ["limit_group_timeouts"]


def limit_group_timeouts(seconds: float) -> None:
    """Gives this timeout to every process group that is made from now on without its own, also to the hosts' groups.

    torch's defaults are 600 s for NCCL and 1800 s for gloo. For a process of db-SP's own that ends with the run:
    nothing is undone. Call it before the hosts are imported, which take the functions from torch by name.
    """
    timeout = timedelta(seconds=seconds)
    for name in ("init_process_group", "new_group"):
        original = getattr(distributed_c10d, name)
        limited = _with_timeout(original, timeout)
        for module in (dist, distributed_c10d, device_mesh):
            if getattr(module, name, None) is original:
                setattr(module, name, limited)


def _with_timeout(function: Callable[..., Any], timeout: timedelta) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @functools.wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("timeout") is None:
            given.arguments["timeout"] = timeout
        return function(*given.args, **given.kwargs)

    return limited
