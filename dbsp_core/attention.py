"""Dual-balanced attention: the one place where the steps meet.

q, k, v at home → plan → route to owners → y periods of kernel beside rotation → route home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dbsp_core.agreement import agree
from dbsp_core.errors import UserError
from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan
from dbsp_core.ring import ring_attention
from dbsp_core.route import Route, build_route
from dbsp_core.strategy import Strategy
from dbsp_core.tables import PeriodTable, build_tables, whole_heads
from dbsp_kernels import Needs, WholeHeads, choose_kernel, require_fit

__all__ = ["DualBalancedAttention", "dual_balanced_attention"]


PLANS_DIFFER = "the plan differs on rank(s) {}; give all ranks one mask"


@dataclass(frozen=True, eq=False)
class DualBalancedAttention:
    """Attention under one plan and one mask on one rank, ready to be called for many q, k, v; made by `prepare`."""

    plan: Plan
    route: Route
    tables: tuple[PeriodTable, ...]
    group: SequenceGroup
    n_local: int
    kernel: str = "auto"
    debug: bool = False
    whole: WholeHeads | None = None

    @classmethod
    def prepare(
        cls,
        plan: Plan,
        mask: BlockMask,
        home: HomeLayout,
        group: SequenceGroup,
        *,
        n_local: int | None = None,
        device: torch.device | str = "cpu",
        kernel: str = "auto",
        debug: bool = False,
        route: Route | None = None,
    ) -> DualBalancedAttention:
        """Builds this rank's route and kernel tables.

        plan:    from `make_plan`, equal on all ranks, made for `home`
        n_local: places this rank has, with or without the padding at the end (default: with)
        kernel:  a name from dbsp_kernels.KERNELS, or "auto"
        debug:   before every call all ranks agree that inputs are finite and plans equal, or raise together
        route:   the plan's, on the CPU, where it was built before
        Raises ValueError when plan, mask, home layout and group don't fit each other, or the kernel can't serve the
        plan: on all ranks alike.
        """
        plan.strategy.require_world(group.size)
        if plan.heads != mask.heads:
            raise UserError(f"the plan has {plan.heads} heads, the mask {mask.heads}; make a plan for this mask")
        whole = whole_heads(plan, group.rank)
        require_fit(kernel, Needs(lse=plan.strategy.ring > 1, ragged_rows=whole is None))
        mask = mask.refined(plan.grid)
        n_local = home.shard if n_local is None else n_local
        least = int(home.tokens_at(group.rank)[1].max(initial=-1)) + 1
        if not least <= n_local <= home.shard:
            raise UserError(
                f"rank {group.rank} holds {n_local} tokens, expected {least} ({home.shard} with padding): "
                f"{home.tokens} tokens are shared by {home.world} ranks"
            )
        device = torch.device(device)
        route = (route or build_route(plan, home, group.rank, n_local, torch.device("cpu"))).to(device)
        tables = build_tables(plan, mask, group.rank, device)
        return cls(plan, route, tables, group, n_local, kernel, debug, whole)

    def for_mask(self, plan: Plan, mask: BlockMask) -> DualBalancedAttention:
        """The same route with another mask's tables. plan: with the same owners and slots as this one's"""
        tables = build_tables(plan, mask.refined(plan.grid), self.group.rank, self.device)
        return replace(self, plan=plan, tables=tables)

    @property
    def device(self) -> torch.device:
        """Where its tables are."""
        return self.tables[0].kv_len.device

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q, k, v: [B, H, n_local, D], this rank's home tokens.

        scale:   of the scores, default D^−1/2
        returns: [B, H, n_local, D], zero at padding and at queries whose row has no blocks
        Raises ValueError before any collective when the shapes don't fit.
        """
        self._check(q, k, v)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return self.route.to_homes(self._at_owners(q, k, v, scale), q, self.group)

    def _at_owners(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, Rq·Bq, D], the output of this rank's rows. What they were computed from is let go with it."""
        batch, _, _, width = q.shape
        grid, strategy = self.plan.grid, self.plan.strategy
        packed_q, packed_kv = self.route.to_owners(q, k, v, self.group)
        rows = packed_q.view(-1, grid.block_q, width)
        kv = packed_kv.view(2, batch, -1, grid.block_k, width)
        out = ring_attention(rows, kv, self.tables, strategy, self.group, scale, self.kernel, self.whole)
        return out.view(batch, -1, width)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        problem = self._problem(q, k, v)
        if self.debug:
            if problem is None and not all(bool(t.isfinite().all()) for t in (q, k, v)):
                problem = "q, k or v has values that are not finite"
            agree(
                self.group,
                None if problem is None else UserError(problem),
                self.plan.fingerprint,
                q.device,
                PLANS_DIFFER,
            )
        if problem is not None:
            raise UserError(problem)

    def _problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """What is wrong with the inputs, seen from this rank alone."""
        if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            return f"q, k, v must be [batch, heads, n_local, D] of one shape, got {shapes}"
        if q.shape[1] != self.plan.heads or q.shape[2] != self.n_local:
            return (
                f"q of shape {tuple(q.shape)} does not fit: the plan has {self.plan.heads} heads and rank "
                f"{self.group.rank} holds {self.n_local} tokens"
            )
        try:
            blocks = (self.plan.grid.block_q, self.plan.grid.block_k)
            needs = Needs(blocks, q.shape[3], lse=len(self.tables) > 1, ragged_rows=self.whole is None)
            choose_kernel(self.kernel, q.device.type, q.dtype, needs)
        except ValueError as error:
            return str(error)
        return None


def dual_balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    strategy: Strategy | str,
    *,
    planner: str = "dbsp",
    home: HomeLayout | None = None,
    reward: float = 1.0,
    group: SequenceGroup | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    debug: bool = False,
) -> torch.Tensor:
    """Block-sparse attention over all ranks of `group` (default: torch.distributed's), called by every one of them.

    q, k, v: [B, H, n_local, D], this rank's tokens under `home` (default contiguous: shards of ceil(tokens / P))
    mask:    equal on all ranks
    returns: [B, H, n_local, D]
    Plans anew at every call: for many calls with one mask, keep a `DualBalancedAttention`.
    """
    group = group or SequenceGroup.of()
    strategy = Strategy.parse(strategy)
    strategy.require_world(group.size)
    home = home or HomeLayout.contiguous(mask.grid.tokens, strategy.world)
    plan = make_plan(mask, strategy, planner, home=home, reward=reward)
    attend = DualBalancedAttention.prepare(
        plan, mask, home, group, n_local=q.shape[-2], device=q.device, kernel=kernel, debug=debug
    )
    return attend(q, k, v, scale=scale)
