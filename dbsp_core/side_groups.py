"""gloo groups of the same ranks beside a process group, for what must not disturb its collectives.

They are torn down with `destroy_process_group()`: a group that something still held would keep its threads, and a
thread that drops its last tensors while the interpreter ends aborts the process.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

__all__ = ["side_group", "timeout_of"]

_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, weakref.ref[dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


def side_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """The ranks of `group` in a gloo group of their own, one for each purpose, with the group's own timeout.

    Collective at the first call.
    """
    beside = _BESIDE.setdefault(group, {})
    known = beside[purpose]() if purpose in beside else None
    if known is None:
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_of(group)
        known = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
        beside[purpose] = weakref.ref(known)  # torch itself holds it until the groups are destroyed
    return known


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """After which a group's collectives fail; None where its backend does not tell."""
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None
