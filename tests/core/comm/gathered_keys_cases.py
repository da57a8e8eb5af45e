"""A third way for keys to travel, which is one class: every rank gathers all keys of the heads that it has rows of."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from dbsp_core import BlockMask, make_plan
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.masks.mask_counts import MaskCounts
from dbsp_core.planning.key_chunks import KEYS
from dbsp_core.planning.key_travel import KeyTravel
from dbsp_core.planning.row_owners import RowOwners
from dbsp_core.runtime.rank_plan import RankPlan
from tests.core.runtime.gradients.gradient_cases import run_gradients
from tests.support.attention_cases import Case, Inputs, run_case


@dataclass(frozen=True, eq=False, repr=False)
class GatheredKeys(KeyTravel):
    """Each head's keys and values, all in one exchange before the only kernel, to every rank with rows of the head."""

    name = "gathered"
    known_masks = False
    lockstep = False

    @classmethod
    def of(cls, rows: RowOwners, slot: np.ndarray, mask: BlockMask) -> GatheredKeys:
        return cls(slot)

    periods = exchanges = 1
    at_once = sends_all = True

    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        heads, blocks = np.flatnonzero(_gathers(rows)[rank]), self.slot.shape[1]
        return [(np.repeat(heads, blocks), np.tile(np.arange(blocks), len(heads)))]

    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        ranks = np.where(_gathers(rows)[:, heads], np.arange(rows.strategy.world)[:, None], -1)
        return np.repeat(ranks.T[:, None], len(blocks), axis=1)

    def copies(self, rows: RowOwners, heads: np.ndarray) -> Sequence[np.ndarray]:
        return [np.repeat(_gathers(rows)[:, heads].sum(axis=1)[:, None], self.slot.shape[1], axis=1)]

    def all_blocks(self, rows: RowOwners, exchanged: np.ndarray) -> np.ndarray:
        return exchanged

    def work(self, rows: RowOwners, counts: MaskCounts) -> np.ndarray:
        work = np.bincount(rows.q_owner.ravel(), counts.rows.ravel(), rows.strategy.world)
        return work.astype(np.int64)[None]

    def extra(self, rows: RowOwners) -> float:
        return int((_gathers(rows).sum(axis=0) - 1).clip(min=0).sum()) * 2 / (3 * rows.heads)

    def serves(self, rows: RowOwners, mask: BlockMask) -> bool:
        return True

    def identity(self) -> tuple[Any, ...]:
        return (self.slot,)


def _gathers(rows: RowOwners) -> np.ndarray:
    """bool[P, H]: whether a rank has rows of a head."""
    found = np.zeros((rows.strategy.world, rows.heads), dtype=bool)
    found[rows.q_owner, np.arange(rows.heads)[:, None]] = True
    return found


class _OneLeftOut(GatheredKeys):
    """A negative control: the first KV block of each head is sent to none, and left out by all."""

    def holders(self, rows: RowOwners, exchange: int, heads: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        return np.where((blocks == 0)[None, :, None], -1, super().holders(rows, exchange, heads, blocks))

    def blocks_by_period(self, rows: RowOwners, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        (head, block), *_ = super().blocks_by_period(rows, rank)
        return [(head[block > 0], block[block > 0])]


def travelling(wrong: bool = False) -> contextlib.AbstractContextManager[object]:
    """Within it, keys can travel that way, or the wrong one."""
    return patch.dict(KEYS, {GatheredKeys.name: _OneLeftOut if wrong else GatheredKeys})


def errors(rank: int, world: int, case: Case) -> tuple[float, float, float]:
    """Largest absolute errors of the output, without and with gradients, and of the gradients."""
    return (run_case(rank, world, case), *run_gradients(rank, world, case))


def modelled(case: Case) -> tuple[list[int], list[int], float]:
    """Tokens that each rank sends to owners, by routes and by the model; and modelled seconds."""
    with travelling():
        given = Inputs.of(case, 0)
        layout, world = given.layout, given.layout.world
        plan = make_plan(given.mask, case.strategy, layout=layout, keys=case.keys)
        traffic = traffic_of(plan.assignment, layout)
        moved = traffic.queries + 2 * traffic.keys.sum(axis=0)
        np.fill_diagonal(moved, 0)
        sent = [RankPlan.of(plan.assignment, layout, rank).route.tokens_sent(rank)[0] for rank in range(world)]
        shape = AttentionShape(1, case.heads, case.tokens, case.width)
        seconds = predict(plan, shape, load_hardware("h200"), Topology(world), layout).total_s
        return sent, moved.sum(axis=1).astype(int).tolist(), seconds
