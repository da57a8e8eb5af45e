"""Dual-balanced attention: the one place where the steps meet.

q, k, v at home → plan → route to owners → y periods of kernel beside rotation → route home.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dbsp_core.groups import SequenceGroup
from dbsp_core.home import HomeLayout
from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan, make_plan
from dbsp_core.ring import ring_attention
from dbsp_core.route import Route, build_route
from dbsp_core.strategy import Strategy
from dbsp_core.tables import PeriodTable, build_tables
from dbsp_kernels import choose_kernel

__all__ = ["DualBalancedAttention", "dual_balanced_attention"]


@dataclass(frozen=True, eq=False)
class DualBalancedAttention:
    """Attention under one plan and one mask, ready to be called for many q, k, v.

    plan:   from `make_plan`, equal on all ranks, made for `home`
    kernel: a name from dbsp_kernels.KERNELS, or "auto"
    debug:  before every call all ranks agree that their inputs are finite and their plans equal, or raise together
    """

    plan: Plan
    mask: BlockMask
    home: HomeLayout
    group: SequenceGroup
    kernel: str = "auto"
    debug: bool = False
    _tables: dict[torch.device, tuple[PeriodTable, ...]] = field(default_factory=dict, repr=False)
    _routes: dict[tuple[torch.device, int], Route] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.plan.strategy.require_world(self.group.size)
        if self.plan.grid != self.mask.grid or self.plan.heads != self.mask.heads:
            raise ValueError("the plan was made for a mask of another grid or number of heads; make one for this mask")

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
    ) -> torch.Tensor:
        """q, k, v: [B, H, n_local, D], this rank's home tokens, with or without padding at the end.

        scale:   of the scores, default D^−1/2
        returns: [B, H, n_local, D], zero at padding and at queries whose row has no blocks
        Raises ValueError on every rank before any collective when the shapes don't fit the mask and home layout.
        """
        self._check(q, k, v)
        batch, heads, n_local, width = q.shape
        grid, strategy = self.plan.grid, self.plan.strategy
        route, tables = self._prepared(q.device, n_local)
        flat_q, flat_k, flat_v = (t.permute(1, 2, 0, 3).reshape(heads * n_local, batch * width) for t in (q, k, v))
        packed_q, packed_kv = route.to_owners(flat_q, flat_k, flat_v, self.group)
        rows = packed_q.view(-1, grid.block_q, batch, width).permute(2, 0, 1, 3).flatten(0, 1)
        kv = packed_kv.view(2, -1, grid.block_k, batch, width).permute(0, 3, 1, 2, 4).contiguous()
        scale = width**-0.5 if scale is None else scale
        out = ring_attention(rows, kv, tables, strategy, self.group, scale, self.kernel)
        packed_out = out.view(batch, -1, width).transpose(0, 1).reshape(-1, batch * width)
        home = route.to_homes(packed_out, self.group)
        return home.view(heads, n_local, batch, width).permute(2, 0, 1, 3)

    def _prepared(self, device: torch.device, n_local: int) -> tuple[Route, tuple[PeriodTable, ...]]:
        """Route and tables on `device`, built at the first call."""
        if device not in self._tables:
            self._tables[device] = build_tables(self.plan, self.mask, self.group.rank, device)
        if (device, n_local) not in self._routes:
            self._routes[device, n_local] = build_route(self.plan, self.home, self.group.rank, n_local, device)
        return self._routes[device, n_local], self._tables[device]

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        problem = self._problem(q, k, v)
        if self.debug:
            _agree(self.group, problem, self.plan.fingerprint, q, k, v)
        if problem is not None:
            raise ValueError(problem)

    def _problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """What is wrong with the inputs, seen from this rank alone."""
        if q.ndim != 4 or q.shape != k.shape or q.shape != v.shape:
            shapes = ", ".join(str(tuple(t.shape)) for t in (q, k, v))
            return f"q, k, v must be [batch, heads, n_local, D] of one shape, got {shapes}"
        least = len(self.home.local_order(self.group.rank))
        if q.shape[1] != self.mask.heads or not least <= q.shape[2] <= self.home.shard:
            return (
                f"q of shape {tuple(q.shape)} does not fit the mask: expected {self.mask.heads} heads and {least} tokens "
                f"on rank {self.group.rank} ({self.home.shard} with padding), since {self.home.tokens} tokens are "
                f"shared by {self.home.world} ranks"
            )
        try:
            choose_kernel(self.kernel, q.device.type, q.dtype)
        except ValueError as error:
            return str(error)
        return None


def _agree(group: SequenceGroup, problem: str | None, fingerprint: int, *tensors: torch.Tensor) -> None:
    """Raises on all ranks alike when any rank has a problem, inputs that are not finite, or another plan."""
    finite = all(bool(t.isfinite().all()) for t in tensors)
    states = group.gather_integers([int(problem is None), int(finite), fingerprint], tensors[0].device)
    ranks = range(len(states))
    fingerprints = [state[2] for state in states]
    usual = max(fingerprints, key=fingerprints.count)
    for differing, complaint in (
        ([r for r in ranks if not states[r][0]], f"inputs do not fit on rank(s) {{}}{f': {problem}' if problem else ''}"),
        ([r for r in ranks if not states[r][1]], "q, k or v has values that are not finite on rank(s) {}"),
        ([r for r in ranks if fingerprints[r] != usual], "the plan differs on rank(s) {}; give all ranks one mask"),
    ):
        if differing:
            raise ValueError(complaint.format(differing))


def dual_balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: BlockMask,
    strategy: Strategy | str,
    *,
    planner: str = "paper",
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
    attend = DualBalancedAttention(plan, mask, home, group, kernel, debug)
    return attend(q, k, v, scale=scale)
