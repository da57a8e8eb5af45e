"""gloo groups of the same ranks beside a process group, for what must not disturb its collectives.

They are torn down with `destroy_process_group()`: a group that something still held would keep its threads, and a
thread that drops its last tensors while the interpreter ends aborts the process.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch.distributed as dist

__all__ = ["side_group"]

_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, weakref.ref[dist.ProcessGroup]]] = (
    weakref.WeakKeyDictionary()
)


def side_group(group: dist.ProcessGroup, purpose: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """The ranks of `group` in a gloo group of their own, one for each purpose. Collective at the first call.

    timeout: after which its collectives fail; torch's default where None. Only the first call's counts
    """
    beside = _BESIDE.setdefault(group, {})
    known = beside[purpose]() if purpose in beside else None
    if known is None:
        ranks = dist.get_process_group_ranks(group)
        known = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
        beside[purpose] = weakref.ref(known)  # torch itself holds it until the groups are destroyed
    return known
