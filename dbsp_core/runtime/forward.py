"""One attention on one rank, with gradients or without: to the owners of rows, all periods there, and home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.kernel_tables import RingStepTable
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.ring import keys_to_come, ring_attention
from dbsp_kernels import Kernel

__all__ = ["PreparedAttention", "forward"]

Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes what backward needs at the owner: rows [B·Rq, Bq, D], the first slot [2, B, Ck, Bk, D], the rows' output and
its log-sum-exp [B·Rq, Bq]."""


@dataclass(eq=False, repr=False)
class PreparedAttention:
    """What does not depend on q, k and v.

    Attributes:
        part: This rank's part in the plan, with its tables on the device.
        plan: The same plan, with the numbers of the mask.
        tables: By period, those of the mask.
        group: The ranks that share the sequence.
    """

    part: RankPlan
    plan: Plan
    tables: tuple[RingStepTable, ...]
    group: SequenceGroup


def forward(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kernel: Kernel,
    keep: Keep | None = None,
) -> torch.Tensor:
    """Computes attention under a prepared plan and mask. Collective.

    Args:
        q, k, v: [B, H, n_local, D].
        keep: Is given what backward needs, of which nothing is held without it.

    Returns:
        [B, H, n_local, D]. Collective.
    """
    out = [_at_owners(prepared, q, k, v, scale, kernel, keep)]
    return prepared.part.route.combine(out.pop(), q, prepared.group)


def _at_owners(
    prepared: PreparedAttention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    kernel: Kernel,
    keep: Keep | None,
) -> torch.Tensor:
    """[B, Rq·Bq, D], the output of this rank's rows. What they were computed from is released with it."""
    batch, _, _, width = q.shape
    plan, route = prepared.plan, prepared.part.route
    packed_q, packed_kv = route.dispatch(q, k, v, prepared.group)
    rows = packed_q.view(-1, plan.grid.block_q, width)
    first_slot = [packed_kv.view(2, batch, -1, plan.grid.block_k, width)]
    del packed_kv  # or slot 0 would be held while all others pass
    kept_slot = None if keep is None else first_slot[0]
    out, lse = ring_attention(
        rows,
        first_slot.pop,
        keys_to_come(route, k, v, plan.strategy, prepared.group),
        prepared.tables,
        scale,
        kernel,
        prepared.part.head_layout,
        lse=keep is not None,
    )
    if keep is not None and kept_slot is not None:
        keep(rows, kept_slot, out, lse)
    return out.view(batch, -1, width)
