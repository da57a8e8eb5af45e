"""Groups made from a process group: its ranks over gloo, for collectives that must not be mixed with others; parts.

They are destroyed when the group is, or when all of torch's groups are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

CONTROL = "control"
"""Purpose of the group in which ranks agree on things."""
_Groups = dict[str, weakref.ref[dist.ProcessGroup]]
_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, _Groups] = weakref.WeakKeyDictionary()
"""The groups made from each group, by purpose."""


def subgroup(group: dist.ProcessGroup, purpose: str, ranks: range, backend: str) -> dist.ProcessGroup:
    """Returns a group of some ranks of `group`, this one among them, for one purpose, with the same options.

    Collective for these ranks at the first call; no others take part.
    """
    groups = _MADE.get(group)
    if groups is None:
        groups = _MADE[group] = {}
        weakref.finalize(group, _destroy, groups).atexit = False
    known = groups[purpose]() if purpose in groups else None
    if known is None:
        known = _made(group, purpose, ranks, backend)
        groups[purpose] = weakref.ref(known)  # torch itself holds it
    return known


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Returns the time after which a group's collectives fail; None if its backend does not have the option."""
    timeouts = (getattr(options, "_timeout", None) for options in _backend_options(group))
    return next((timeout for timeout in timeouts if isinstance(timeout, timedelta)), None)


def _backend_options(group: dist.ProcessGroup) -> Iterator[Any]:
    """Yields the options of a group's backends that have any."""
    for device_type in group._device_types:
        options = getattr(group._get_backend(device_type), "options", None)
        if options is not None:
            yield options


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """Returns new options for NCCL with a group's timeout, stream priority and limits; None if it is not over NCCL.

    Not a copy: torch writes name, ranks and the communicator to split into the options of each group that it makes.
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
    """Makes a group of some ranks of `group`, under a name that is not reused.

    Otherwise as `dist.new_group(use_local_synchronization=True)` does. torch names a group after its ranks and the
    number of groups that this rank has. That number differs between ranks, and it repeats once a group was destroyed,
    whose addresses in the store nobody answers any more.
    """
    make: Any = distributed_c10d._new_process_group_helper
    numbers = dist.get_process_group_ranks(group)
    made: dist.ProcessGroup
    with _unbound_default_group():
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
    distributed_c10d._world.pg_group_ranks[made] = {numbers[rank]: index for index, rank in enumerate(ranks)}
    if purpose != CONTROL:  # whose first use is a gather of all ranks at once
        meet(made)  # a rank that destroyed it at once would cut off others that are still connecting
    return made


@contextmanager
def _unbound_default_group() -> Iterator[None]:
    """Keeps torch from splitting a new communicator off the default group's, for which all of its ranks must call.

    torch does so if `init_process_group` was given `device_id`. The ranks of a part alone would wait for ever.
    """
    default = distributed_c10d._get_default_group()
    device = default.bound_device_id
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = device


def meet(group: dist.ProcessGroup | None = None) -> None:
    """Returns once all ranks of a group have called it, with the group's communicators made. Collective.

    NCCL makes a communicator at its first use. If that is a transfer between some ranks, or differs between groups,
    the others may wait for ever; and `dist.barrier` takes a GPU by the rank's number. So the first use is an
    all-reduce, on the current GPU.
    """
    if not over_nccl(group):
        dist.barrier(group)
        return
    if "gloo" in dist.get_backend_config(group):  # it carries the tensors on CPUs
        dist.all_reduce(torch.zeros(1, device="cpu"), group=group)
    dist.all_reduce(torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())), group=group)
    torch.cuda.current_stream().synchronize()


def over_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Returns True if NCCL carries a group's tensors on GPUs. None: the default group."""
    try:
        return "nccl" in dist.get_backend_config(group)
    except (TypeError, ValueError):  # destroyed meanwhile, as the first use of the group will say
        return False


def _destroy(groups: _Groups) -> None:
    """Destroys the groups made from a group. Not collective."""
    for known in groups.values():
        made = known()
        if made is not None:
            with suppress(ValueError):  # torch's destroying of all groups is under way
                dist.destroy_process_group(made)
