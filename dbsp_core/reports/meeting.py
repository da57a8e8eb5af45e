"""Coming together after a run, of ranks that may have failed in it: nobody is waited for for ever."""

from __future__ import annotations

import torch.distributed as dist

from dbsp_core.groups import SequenceGroup

__all__ = ["meet", "meeting_group"]


def meeting_group(group: SequenceGroup) -> SequenceGroup:
    """The ranks in a gloo group of their own, which nothing else uses. Collective at the first call.

    What becomes of it when a rank does not come disturbs no attention. Ranks wait for one another as long as the
    group's own timeout says.
    """
    return group.beside("meeting")


def meet(group: SequenceGroup) -> None:
    """Returns once all ranks of a meeting group have called it. Raises RuntimeError where one does not in time."""
    if group.group is None:
        return
    try:
        dist.monitored_barrier(group.group, group.timeout)
    except RuntimeError as error:
        limit = "the time limit" if group.timeout is None else f"{group.timeout.total_seconds():g} s"
        raise RuntimeError(
            f"not all ranks came within {limit}; the run may have failed on one ({' '.join(str(error).split())})"
        ) from error
