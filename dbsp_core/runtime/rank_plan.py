"""One rank's part in a plan: all that follows from the plan and the sequence layout, whatever the mask."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from dbsp_core.comm.exchange import Route
from dbsp_core.comm.exchange_backward import BackwardRoute
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.tables import TableLayout, TransposedLayout, table_layout, transposed_layouts, whole_head_tokens

__all__ = ["RankPlan"]


@dataclass(frozen=True, eq=False, repr=False)
class RankPlan:
    """What a plan means for one rank. It holds it, so that neither is used with another's.

    Attributes:
        plan: What it was made from.
        layout: The sequence layout that it was made for.
        rank: Whose part it is.
        route: How tensors travel between homes and owners, whatever the mask.
        table_layout: What the kernel tables of every mask have in common.
        n_local: Tokens this rank holds outside attention.
        head_tokens: Tokens of a head, if the rank's rows are those of whole heads; see `dbsp_kernels.block_attention`.
    """

    plan: Plan
    layout: SequenceLayout
    rank: int
    route: Route
    table_layout: TableLayout
    n_local: int
    head_tokens: int | None

    @classmethod
    def of(cls, plan: Plan, layout: SequenceLayout, rank: int, n_local: int | None = None) -> RankPlan:
        """Made on the host, by any thread.

        Args:
            n_local: Default with the padding at the end.
        """
        n_local = layout.shard if n_local is None else n_local
        route = build_route(plan, layout, rank, n_local, torch.device("cpu"))
        tables, head_tokens = table_layout(plan, rank), whole_head_tokens(plan)
        return cls(plan, layout, rank, route, tables, n_local, head_tokens)

    @cached_property
    def transposed(self) -> tuple[TransposedLayout, ...]:
        """What transposes the kernel tables of each chunk, for backward. Made at the first use."""
        return transposed_layouts(self.table_layout)

    @cached_property
    def backward_route(self) -> BackwardRoute:
        """How gradients travel: its route, the other way round. Made at the first use."""
        return BackwardRoute.of(self.route)

    def to(self, device: torch.device) -> RankPlan:
        """The same with its tables on a device. They are on the host."""
        return replace(self, route=self.route.to(device), table_layout=self.table_layout.to(device))
