"""What ranks on simulated GPUs run: comparisons, votes and texts, which must not wait for any device."""

from __future__ import annotations

import torch

from dbsp_core import SequenceGroup
from dbsp_core.comm.consistency import check_consistent, gather_texts
from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime.consistency_checks import check_attention
from dbsp_core.runtime.engine_session import EngineSession
from tests.gpu_node.faults import recorded


def host_waits_of_comparisons(rank: int, world: int) -> tuple[list[bool], list[str], dict[str, int]]:
    """A vote, a text of each rank, and the host waits of all that ranks compare."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = SequenceGroup.from_group()
    session = EngineSession(group, Strategy(world, 1), 8, 1, {"mask": {"source": "dense"}})
    q = torch.ones(1, 8, 4, 16).to(device)
    group.control().barrier()
    if rank == 0:
        recorded.host_waits.clear()
    group.control().barrier()
    check_attention(group, q, q, q, None, None, prepared=None, debug=False)
    check_consistent(group, None, {"numbers differ on rank(s) {}": 1})
    votes = [session.all_agree(answer) for answer in (True, rank == 0)]
    texts = gather_texts(group, f"rank {rank}")
    group.control().barrier()
    return votes, texts, dict(recorded.host_waits)


def inputs_on_the_host(rank: int, world: int, on_the_host: int) -> str:
    """The error of ranks of which one was given q, k and v on the host."""
    torch.cuda.set_device(rank)
    q = torch.ones(1, 8, 4, 16)
    q = q if rank == on_the_host else q.to(torch.device("cuda", rank))
    try:
        check_attention(SequenceGroup.from_group(), q, q, q, None, None, prepared=None, debug=False)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return ""
