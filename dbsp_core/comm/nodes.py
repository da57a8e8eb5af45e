"""Which ranks of a group share a node."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["gather_nodes", "ranks_on_this_node"]


def gather_nodes(group: SequenceGroup) -> tuple[int, ...]:
    """The node of each rank, numbered as they come; on all ranks alike, whatever each has been told. Collective.

    Told by torchrun's GROUP_RANK, where every rank has one; else by LOCAL_WORLD_SIZE, where it is one number on all
    ranks: so many that follow one another share a node; else by the names of the hosts.
    """
    process_group = group.group
    if process_group is None:
        return (0,) * group.size
    mine = [_number("GROUP_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), fingerprint_of(socket.gethostname())]
    agents, sizes, hosts = zip(*group.control().gather_integers(mine, torch.device("cpu")), strict=True)
    told: Sequence[int] = hosts
    if min(agents) >= 0:
        told = agents
    elif sizes[0] > 0 and len(set(sizes)) == 1:
        told = [rank // sizes[0] for rank in dist.get_process_group_ranks(process_group)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(told))}
    return tuple(numbers[name] for name in told)


def ranks_on_this_node() -> int | None:
    """As the launcher says it; None where it does not."""
    told = _number("LOCAL_WORLD_SIZE", 1)
    return None if told < 0 else told


def _number(variable: str, least: int) -> int:
    """An environment variable's; −1 where it has none, or one below the least."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() and len(text) < 10 and int(text) >= least else -1
