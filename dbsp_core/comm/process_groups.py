"""Groups derived from a process group: gloo groups of the same ranks for separate collectives, and parts.

They are destroyed together with the group they derive from.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

CONTROL = "control"
"""Purpose of the group for `consistency.agree`."""
_Groups = dict[str, weakref.ref[dist.ProcessGroup]]
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, _Groups] = weakref.WeakKeyDictionary()
"""Derived groups by group and purpose."""


def subgroup(group: dist.ProcessGroup, purpose: str, ranks: range, backend: str) -> dist.ProcessGroup:
    """Returns a group of `ranks` for a purpose, with the options of `group`. Collective for `ranks` at first call."""
    groups = _MADE.get(group)
    if groups is None:
        groups = _MADE[group] = {}
        weakref.finalize(group, _destroy, groups).atexit = False
    known = groups[purpose]() if purpose in groups else None
    if known is None:
        known = _made(group, purpose, ranks, backend)
        groups[purpose] = weakref.ref(known)  # torch holds it
    return known


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the timeout of a group's collectives; None if its backend has no such option."""
    timeouts = (getattr(options, "_timeout", None) for options in _backend_options(group))
    return next((timeout for timeout in timeouts if isinstance(timeout, timedelta)), None)


def _backend_options(group: dist.ProcessGroup) -> Iterator[Any]:
    """Yields the options of a group's backends."""
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        if options is not None:
            yield options


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """Returns new NCCL options with a group's timeout, stream priority and limits; None without NCCL.

    Not a copy: torch writes name, ranks and the communicator to split into each group's options.
    """
    parent = next(
        (options for options in _backend_options(group) if hasattr(options, "is_high_priority_stream")), None
    )
    if parent is None:
        return None
    options = type(parent)(is_high_priority_stream=parent.is_high_priority_stream)
    options.config, options._timeout = parent.config, parent._timeout
    return options


def _made(group: dist.ProcessGroup, purpose: str, ranks: range, backend: str) -> dist.ProcessGroup:
    """Makes a group of some ranks like `dist.new_group(use_local_synchronization=True)`, under a unique name.

    torch names a group after its ranks and this rank's number of groups. That number differs between ranks, and it
    repeats after a group is destroyed, whose addresses are still in the store.
    """
    make: Any = distributed_c10d._new_process_group_helper
    numbers = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup
    # With `device_id` in `init_process_group`, torch would split the new communicator off the default group's, which
    # all of its ranks must join: ranks of a part would wait forever.
    default = distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        made, _ = make(
            len(ranks),
            ranks.index(group.rank()),
            [numbers[rank] for rank in ranks],
            backend,
            distributed_c10d._get_default_store(),
            group_name=f"{group.group_name}/dbsp-{purpose}",
            backend_options=_nccl_options(group) if "nccl" in backend else None,
            timeout=timeout_of(group) or default_pg_timeout,
        )
    finally:
        default.bound_device_id = device
    distributed_c10d._world.pg_group_ranks[made] = {numbers[rank]: index for index, rank in enumerate(ranks)}
    if purpose != CONTROL:  # CONTROL is first used by all ranks at once
        meet(made)  # or a rank that destroys it early disconnects ranks that are still connecting
    return made


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Waits until all ranks of a group have called it, and creates the group's communicators. Collective.

    NCCL creates a communicator at first use. If that were a transfer between some ranks, or in different order across
    groups, others could wait forever. `dist.barrier` picks a GPU by rank, so this is an all-reduce on the current GPU.
    """
    if not over_nccl(group):
        dist.barrier(group)
        return
    if "gloo" in dist.get_backend_config(group):  # gloo carries CPU tensors
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
    dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
    torch.cuda.current_stream().synchronize()


def over_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Returns True if NCCL carries a group's GPU tensors. None: the default group."""
    try:
        return "nccl" in dist.get_backend_config(group)
    except (TypeError, ValueError):  # destroyed; the group's next use raises
        return False


def _destroy(groups: _Groups) -> None:
    """Destroys the groups derived from a group. Not collective."""
    for known in groups.values():
        made = known()
        if made is not None:
            with suppress(ValueError):  # torch is destroying all groups
                dist.destroy_process_group(made)
