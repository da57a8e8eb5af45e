"""The nodes of a group's ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch.distributed as dist

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import fingerprint_of
from dbsp_core.utils.process import environment_number

__all__ = ["node_marks", "number_nodes"]


def node_marks() -> list[int]:
    """Returns three numbers by which `number_nodes` knows this rank's node."""
    return [_number("GROUP_RANK", 0), _number("LOCAL_WORLD_SIZE", 1), fingerprint_of(socket.gethostname())]


def number_nodes(group: SequenceGroup, marks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns the node of each rank, numbered by first appearance, from the `node_marks` of all ranks.

    Nodes are known from torchrun's GROUP_RANK where every rank has one; else from LOCAL_WORLD_SIZE, where all ranks
    have the same: that many consecutive ranks share a node; else from the names of the hosts.
    """
    process_group = group.group
    if process_group is None:
        return (0,) * group.size
    agents, sizes, hosts = zip(*marks, strict=True)
    names: Sequence[int] = hosts
    if min(agents) >= 0:
        names = agents
    elif sizes[0] > 0 and len(set(sizes)) == 1:
        names = [rank // sizes[0] for rank in dist.get_process_group_ranks(process_group)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _number(variable: str, least: int) -> int:
    """The number in an environment variable; −1 without one, or for one below `least`."""
    found = environment_number(variable)
    return -1 if found is None or found < least else found
