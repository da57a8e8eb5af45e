"""Counting the dense blocks of a mask, on the device where its bits are; what planners look at."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from dbsp_core.imbalance import period_counts
from dbsp_core.strategy import Strategy

__all__ = ["MaskCounts"]

REMEMBERED = 4  # assignments of slots whose counts are kept: a planner's own, the baseline's, and those before


class MaskCounts:
    """Counts of bits bool[H, nq, nk]. Each is made once, head by head: widened, a head is four times its bits."""

    def __init__(self, bits: torch.Tensor) -> None:
        self._bits = bits
        self._cells: list[tuple[int, np.ndarray, np.ndarray]] = []

    @property
    def rows(self) -> np.ndarray:
        """int64[H, nq]: dense blocks per (head, query block), the work of each row."""
        return self._sums[0]

    @property
    def columns(self) -> np.ndarray:
        """int64[H, nk]: rows that need each (head, KV block)."""
        return self._sums[1]

    @cached_property
    def _sums(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(head.sum(dim=1), head.sum(dim=0)) for head in map(torch.Tensor.float, self._bits)]
        rows, columns = (torch.stack(side).long().cpu().numpy() for side in zip(*pairs, strict=True))
        return rows, columns

    def cells(self, slots: np.ndarray, ring: int) -> np.ndarray:
        """int64[H, nq, ring]: dense blocks of each row by the ring slot its keys travel in. slots: int[H, nk]"""
        if ring == 1:
            return self.rows[:, :, None]
        for known_ring, known, cells in self._cells:
            if known_ring == ring and np.array_equal(known, slots):
                return cells
        one_hot = torch.nn.functional.one_hot(torch.from_numpy(slots), ring).float().to(self._bits.device)
        counted = [head.float() @ to_slot for head, to_slot in zip(self._bits, one_hot, strict=True)]
        cells = torch.stack(counted).long().cpu().numpy()  # exact: sums of ones stay below 2**24
        self._cells = [(ring, slots.copy(), cells), *self._cells[: REMEMBERED - 1]]
        return cells

    def work(self, q_owner: np.ndarray, kv_slot: np.ndarray, strategy: Strategy) -> np.ndarray:
        """int64[y, P]: b(i, g) of Eq. 1, dense blocks by (period, rank). q_owner: int[H, nq];  kv_slot: int[H, nk]"""
        cells = self.cells(kv_slot, strategy.ring)
        by_rank = [np.bincount(q_owner.ravel(), cells[..., s].ravel(), strategy.world) for s in range(strategy.ring)]
        return period_counts(np.stack(by_rank, axis=1).astype(np.int64), strategy.ulysses)
