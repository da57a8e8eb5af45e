"""What a planner may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsp_core.layout.strategy import Strategy

__all__ = ["PlannerInput"]


@dataclass(frozen=True, eq=False)
class PlannerInput:
    """Sums of the mask, and where blocks are before the exchange.

    Attributes:
        row_work: int64[H, nq], dense blocks per (head, query block).
        kv_block_work: int64[H, nk], dense blocks per (head, KV block).
        q_home: int64[nq], ring rank that holds most of each query block at home; int64[H, nq] where heads have token
            orders of their own.
        k_home: int64[nk] or int64[H, nk], the same of KV blocks.
        q_position: float64[nq], mean position of each query block's tokens, if each rank is sent only the keys that
            its rows need; else None.
        count_work_by_slot: Takes slots, int64[H, nk]; returns int64[H, nq, y], dense blocks of each row by the slot
            that their keys travel in.
    """

    strategy: Strategy
    row_work: np.ndarray
    kv_block_work: np.ndarray
    q_home: np.ndarray
    k_home: np.ndarray
    q_position: np.ndarray | None
    count_work_by_slot: Callable[[np.ndarray], np.ndarray]

    @property
    def heads(self) -> int:
        return len(self.row_work)
