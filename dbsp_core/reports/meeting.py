"""Coming together after a run, of ranks that may have failed in it: nobody is waited for for ever."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from dbsp_core.groups import SequenceGroup
from dbsp_core.side_groups import side_group

__all__ = ["WAIT_S", "meet", "meeting_group"]

WAIT_S = 120.0
"""Seconds that ranks wait for one another: a rank that failed does not come."""


def meeting_group(group: SequenceGroup) -> SequenceGroup:
    """The ranks in a gloo group of their own, which nothing else uses. Collective at the first call.

    What becomes of it when a rank does not come disturbs no attention.
    """
    if group.group is None:
        return group
    return SequenceGroup(group.rank, group.size, side_group(group.group, "meeting", timedelta(seconds=WAIT_S)))


def meet(group: SequenceGroup) -> None:
    """Returns once all ranks of a meeting group have called it. Raises RuntimeError where one does not in time."""
    if group.group is None:
        return
    try:
        dist.monitored_barrier(group.group, timedelta(seconds=WAIT_S))
    except RuntimeError as error:
        raise RuntimeError(
            f"not all ranks came within {WAIT_S:g} s; the run may have failed on one ({' '.join(str(error).split())})"
        ) from error
