"""One attention on one rank, with gradients or without: to the owners of rows, all periods there, and home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dbsp_core.comm.all_to_all import KeysAtHome
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.token_mean import mean_of_tokens
from dbsp_core.masks.coarse_branch import NO_GRADIENTS, CoarseBranch
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.wire_format import WireFormat
from dbsp_core.runtime.kernel_tables import RingStepTable
from dbsp_core.runtime.rank_plan import RankPlan
from dbsp_core.runtime.ring import Pending, hand_over, ring_attention
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
        coarse: What is added to the output at home; None: nothing.
    """

    part: RankPlan
    plan: Plan
    tables: tuple[RingStepTable, ...]
    group: SequenceGroup
    coarse: CoarseBranch | None = field(default=None, kw_only=True)

    @property
    def wire(self) -> WireFormat:
        """How queries, keys and values are written on their way."""
        return self.part.assignment.wire

    @property
    def no_gradients(self) -> str | None:
        """Why it has no gradients, and what to do. None: it has."""
        return self.wire.no_gradients or (NO_GRADIENTS if self.coarse else None)

    def keys_at_home(self, k: torch.Tensor, v: torch.Tensor) -> KeysAtHome:
        """This rank's k and v [B, H, n_local, D], with what is to be known before they travel. Collective then."""
        return KeysAtHome(k, v, mean_of_tokens(k, self.part.layout, self.group) if self.wire.centred else None)


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
    home = prepared.part.route.combine(out.pop(), q, prepared.group)
    if prepared.coarse is not None:
        prepared.coarse.add_to(home)
    return home


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
    keys, wire = prepared.keys_at_home(k, v), prepared.wire
    packed_q, packed_kv = route.dispatch(q, keys, prepared.group)
    first_slot = [packed_kv.view(2, batch, -1, plan.grid.block_k, packed_kv.shape[-1])]
    del packed_kv  # or slot 0 would be held while all others pass
    rows = wire.read(packed_q, q).view(-1, plan.grid.block_q, width)
    del packed_q
    kept_slot = None if keep is None else first_slot[0]
    out, lse = ring_attention(
        rows,
        first_slot.pop,
        _next_keys(prepared, keys),
        prepared.tables,
        scale,
        kernel,
        prepared.part.head_layout,
        lse=keep is not None,
        read=lambda written: wire.read(written, q),
    )
    if keep is not None and kept_slot is not None:
        keep(rows, kept_slot, out, lse)
    return out.view(batch, -1, width)


def _next_keys(prepared: PreparedAttention, keys: KeysAtHome) -> Callable[[torch.Tensor, int], Pending]:
    """What starts the transfer of the next period's keys; see `ring_attention`."""
    if prepared.part.route.fetch_exchanges:
        coming = prepared.part.route.fetch(keys, prepared.group)
        return lambda kv, next_blocks: next(coming)
    strategy, group = prepared.plan.strategy, prepared.group
    return lambda kv, next_blocks: hand_over(kv, next_blocks, strategy, group)
