"""Groups of our own beside a process group: the same ranks over gloo, for collectives that must meet no others."""

from __future__ import annotations

import weakref
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

__all__ = ["auxiliary_group", "timeout_of"]

_Beside = dict[str, weakref.ref[dist.ProcessGroup]]
_BESIDE: weakref.WeakKeyDictionary[dist.ProcessGroup, _Beside] = weakref.WeakKeyDictionary()


def auxiliary_group(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """The ranks of `group` in a gloo group of their own, one for each purpose, with the group's own timeout.

    Collective at the first call. It is destroyed with `group`: with all of torch's, or when that one is gone.
    """
    beside = _BESIDE.get(group)
    if beside is None:
        beside = _BESIDE[group] = {}
        weakref.finalize(group, _destroy, beside).atexit = False
    known = beside[purpose]() if purpose in beside else None
    if known is None:
        known = _made(group, purpose)
        beside[purpose] = weakref.ref(known)  # torch itself holds it
    return known


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """After which a group's collectives fail; None where its backend does not tell."""
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def _made(group: dist.ProcessGroup, purpose: str) -> dist.ProcessGroup:
    """As `dist.new_group(use_local_synchronization=True)` makes one, but under a name that is never used again.

    Its own names come from the ranks and from how many groups this rank has: that is another number on another rank,
    and the same number again once a group was destroyed, with addresses in the store at which nobody answers.
    """
    make: Any = distributed_c10d._new_process_group_helper
    made: dist.ProcessGroup
    made, _ = make(
        group.size(),
        group.rank(),
        dist.get_process_group_ranks(group),
        "gloo",
        distributed_c10d._get_default_store(),
        group_name=f"{group.group_name}/dbsp-{purpose}",
        timeout=timeout_of(group) or default_pg_timeout,
    )
    distributed_c10d._world.pg_group_ranks[made] = dict(distributed_c10d._world.pg_group_ranks[group])
    dist.barrier(made)  # a rank that destroyed it at once would cut off those that are still connecting
    return made


def _destroy(beside: _Beside) -> None:
    """Each rank on its own: nothing is sent."""
    for known in beside.values():
        made = known()
        if made is not None:
            with suppress(ValueError):  # torch's destroying of all groups is under way
                dist.destroy_process_group(made)
