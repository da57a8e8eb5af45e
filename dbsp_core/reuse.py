"""Keeping plans while they are good enough (paper §4.2.1, threshold P_s)."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from dbsp_core.mask import BlockMask
from dbsp_core.plan import Plan

__all__ = ["PlanCache"]


@dataclass
class PlanCache:
    """One plan per attention, kept while ρ_s of the current mask under it stays at or below `threshold`.

    An attention is a layer's, and a guidance branch's where branches have masks of their own. Whether to keep a plan
    follows from the mask's bits and the kept plan alone, which all ranks share: no rank can decide otherwise than the
    others.
    """

    threshold: float
    calls: int = 0
    replans: int = 0
    _plans: dict[Hashable, Plan] = field(default_factory=dict)

    def plan_for(self, key: Hashable, mask: BlockMask, make: Callable[[BlockMask], Plan]) -> Plan:
        """The kept plan if it still serves, else make(mask)."""
        self.calls += 1
        kept = self._plans.get(key)
        if kept is not None and kept.heads == mask.heads and kept.grid.refines(mask.grid):
            reused = kept.reused_for(mask)
            if reused.rho <= self.threshold:
                return reused
        self.replans += 1
        self._plans[key] = make(mask)
        return self._plans[key]
