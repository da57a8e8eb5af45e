"""Rings in lockstep, as the papers count them: Eq. 1 to 3 of ρ_s, the paper's Algorithm 1 on rings, and their times.

In ring step i, ring rank r computes with slot (r + i) mod y and then hands the slot's keys on: every rank waits for
the slowest in every ring step. db-SP itself has no ring; what it is compared with here has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from dbsp_core.comm.exchange_tables import IMBALANCED
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import (
    MERGE_BYTES,
    AttentionShape,
    Prediction,
    block_s,
    copies_by_rank,
    exchange_s,
    require_network,
    tokens_at,
)
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import majority_ring_ranks
from dbsp_core.planning.planners import contiguous_heads, greedy, snake_heads


def nodes_of(hardware: Hardware, world: int) -> tuple[int, ...]:
    return tuple(rank // (hardware.gpus_per_node or 8) for rank in range(world))


def work_by_ring_step(work_by_slot: np.ndarray, ulysses: int) -> np.ndarray:
    """b(i, g) of Eq. 1, int64[ring, world]: active blocks by (ring step, rank), from int64[world, ring] by slot."""
    world, ring = work_by_slot.shape
    rank = np.arange(world)
    return work_by_slot[rank, (rank // ulysses + np.arange(ring)[:, None]) % ring]


def eq_1(work: np.ndarray) -> float:
    """ρ_s: Σ_i max_g b(i,g) over Σ_i,g b(i,g) / P. One ring step makes it Eq. 2, P ring steps Eq. 3.

    Args:
        work: int64[ring steps, P]. No work at all is balanced: 1.0.
    """
    total = int(work.sum())
    return int(work.max(axis=1).sum()) * work.shape[1] / total if total else 1.0


def work_by_slot(mask: BlockMask, slot: np.ndarray, ring: int) -> np.ndarray:
    """int64[H, nq, ring]: active blocks of each row by the slot that their keys are sent in, int64[H, nk]."""
    if ring == 1:
        return mask.counts.rows[..., None]
    parts, row, column = [], 0, 0
    for part in mask.parts:
        here = torch.from_numpy(slot[:, column : column + part.grid.nk])
        one_hot = torch.nn.functional.one_hot(here, ring).float()
        parts.append(torch.stack([bits.float() @ to for bits, to in zip(part.bits, one_hot, strict=True)]))
        row, column = row + part.grid.nq, column + part.grid.nk
    return torch.cat(parts, dim=1).long().numpy()


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Whole heads on Ulysses ranks, whole blocks on ring ranks and in slots."""

    planner: str
    strategy: Strategy
    grid: BlockGrid
    q_owner: np.ndarray  # int64[H, nq], the rank of each row
    slot: np.ndarray  # int64[H, nk], the ring rank that has each KV block in ring step 0
    work: np.ndarray  # int64[y, P], b(i, g) of its mask
    moved: float  # share of Q, K and V whose ring rank is not that of the rank that holds them outside attention

    @property
    def heads(self) -> int:
        return len(self.q_owner)

    @property
    def rho(self) -> float:
        return eq_1(self.work)

    def evaluate(self, mask: BlockMask) -> RingPlan:
        return replace(self, work=_work(mask, self.q_owner, self.slot, self.strategy))


def plan_ring(
    mask: BlockMask,
    strategy: Strategy | str,
    planner: str = "contiguous",
    layout: SequenceLayout | None = None,
    reward: float = 1.0,
    equal_heads: bool = False,
) -> RingPlan:
    """Plans one attention on a ring by "contiguous", "snake", or "paper": Algorithm 1.

    Args:
        layout: Which rank holds which tokens. Default: contiguous.
        reward: R_b of the paper's biased greedy assignment.
        equal_heads: Whether the paper's Ulysses ranks get equal head counts, up to one.
    """
    strategy, heads = Strategy.parse(strategy), mask.heads
    layout = layout or SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
    x, y, counts = strategy.ulysses, strategy.ring, mask.counts
    q_ring_rank, k_ring_rank = majority_ring_ranks(layout, mask.grid, heads, strategy)
    column = contiguous_heads(heads, x)
    if planner == "snake":
        column = snake_heads(counts.rows.sum(axis=1), x)
    if planner == "paper":
        column = greedy(counts.rows.sum(axis=1), x, cap=-(-heads // x) if equal_heads else None)
        q_ring_rank = greedy(counts.rows.sum(axis=0), y, initial=q_ring_rank, reward=reward)
        k_ring_rank = greedy(mask.square().sum(dim=(0, 1)).numpy(), y, initial=k_ring_rank, reward=reward)
    owner = q_ring_rank * x + column[:, None]
    slot = np.array(np.broadcast_to(k_ring_rank, (heads, mask.grid.nk)))
    work = _work(mask, owner, slot, strategy)
    return RingPlan(planner, strategy, mask.grid, owner, slot, work, _moved(mask.grid, layout, strategy, owner, slot))


def rho_before(mask: BlockMask, strategy: Strategy | str) -> float:
    """ρ_s of plain sequence parallelism, whose ranks wait for one another in every ring step."""
    return plan_ring(mask, strategy).rho


def _work(mask: BlockMask, owner: np.ndarray, slot: np.ndarray, strategy: Strategy) -> np.ndarray:
    cells = work_by_slot(mask, slot, strategy.ring)
    by_slot = [
        np.bincount(owner.ravel(), cells[..., ring_rank].ravel(), strategy.world) for ring_rank in range(strategy.ring)
    ]
    return work_by_ring_step(np.stack(by_slot, axis=1).astype(np.int64), strategy.ulysses)


def _moved(grid: BlockGrid, layout: SequenceLayout, strategy: Strategy, owner: np.ndarray, slot: np.ndarray) -> float:
    if strategy.ring == 1:
        return 0.0
    stays = 0
    for order, heads in grid.order_groups(len(owner)):
        ring_ranks = owner[heads] // strategy.ulysses, slot[heads]
        for held, ring_rank, tensors in zip(layout.block_segments(grid, order), ring_ranks, (1, 2), strict=True):
            cell = held.block * strategy.ring + held.rank // strategy.ulysses
            tokens = np.bincount(cell, held.length, ring_rank.shape[1] * strategy.ring)
            stays += tensors * int(tokens[np.arange(ring_rank.shape[1]) * strategy.ring + ring_rank].sum())
    return 1 - stays / (3 * len(owner) * grid.tokens)


class RingTimes(NamedTuple):
    """Seconds of one attention's ring steps."""

    attention_s: float  # from the first kernel's start until the last rank is done
    compute_s: float  # of the rank that is done last, launches and merges included, as if it waited for nothing


@dataclass(frozen=True)
class RingPrediction(Prediction):
    """Seconds of one attention on a ring, with those of its ring steps."""

    times: RingTimes


def predict_ring(
    plan: RingPlan,
    shape: AttentionShape,
    hardware: Hardware,
    nodes: Sequence[int] | None = None,
    layout: SequenceLayout | None = None,
) -> RingPrediction:
    """Eq. 4 as corrected, of a ring: every rank's real work in each ring step, real bytes, real packing.

    Arguments and errors are those of `dbsp_core.cost.prediction.predict`.
    """
    strategy, grid = plan.strategy, plan.grid
    known = hardware.at_blocks(grid.block_q, grid.block_k)
    nodes = [0] * strategy.world if nodes is None else nodes
    layout = layout or SequenceLayout.contiguous(grid.tokens, strategy.world)
    require_network(hardware, nodes)
    # 1. Tokens from source rank (row) to owner (column), and the KV blocks that each rank holds in each ring step.
    rank_of_key = plan.slot * strategy.ulysses + plan.q_owner[:, :1] % strategy.ulysses
    queries, keys = np.zeros((2, strategy.world, strategy.world))
    for order, heads in grid.order_groups(plan.heads):
        of_queries, of_keys = tokens_at(layout, grid, order)
        queries += of_queries.T @ copies_by_rank(plan.q_owner[heads], strategy.world).T
        keys += of_keys.T @ copies_by_rank(rank_of_key[heads], strategy.world).T
    rows = np.bincount(plan.q_owner.ravel(), minlength=strategy.world)
    by_slot = np.bincount(rank_of_key.ravel(), minlength=strategy.world).reshape(strategy.ring, strategy.ulysses)
    blocks = np.stack([np.roll(by_slot, -step, axis=0).ravel() for step in range(strategy.ring)])
    # 2. Seconds.
    apart = strategy.ring == 1 < strategy.world and rows.max() * strategy.world > IMBALANCED * plan.q_owner.size
    dispatched = [queries, 2 * keys] if apart else [queries + 2 * keys]
    exchanged = [sent * shape.token_bytes for sent in (*dispatched, queries.T)]
    held = blocks[:-1] * (2 * grid.block_k * shape.token_bytes)
    compute = _compute_s(plan, rows, shape, known)
    times = ring_times(compute, ring_sends_s(strategy, held, known, nodes), strategy, known.overlap)
    unpacked = 2 * rows * grid.block_q + 2 * blocks[0] * grid.block_k
    packed = float(((4 * shape.heads * layout.shard + unpacked) * shape.token_bytes).max())
    return RingPrediction(
        exchange_s=sum(exchange_s(sent, known, nodes) for sent in exchanged),
        attention_s=times.attention_s,
        pack_s=packed / known.pack_bytes_per_s,
        launch_s=known.call_s,
        times=times,
    )


def _compute_s(plan: RingPlan, rows: np.ndarray, shape: AttentionShape, known: Constants) -> np.ndarray:
    grid = plan.grid
    seconds: np.ndarray = plan.work * (shape.batch * block_s(grid.block_q, grid.block_k, shape.head_dim, known))
    seconds += rows * (shape.batch * known.row_s)
    seconds[1:] += rows * (grid.block_q * shape.batch * shape.head_dim * MERGE_BYTES / known.merge_bytes_per_s)
    return seconds + known.launch_s


def ring_sends_s(strategy: Strategy, held: np.ndarray, known: Constants, nodes: Sequence[int]) -> list[float]:
    """Seconds of each ring send of `held`, float64[sends, P] bytes, from rank (r, u) to (r − 1, u)."""
    ring_nodes = np.reshape(nodes, (strategy.ring, strategy.ulysses))
    near = ring_nodes == np.roll(ring_nodes, 1, axis=0)
    latency, rate = np.full(near.shape, known.p2p_latency_s), np.full(near.shape, known.p2p_bytes_per_s)
    if known.network_latency_s is not None and known.network_bytes_per_s is not None:
        latency[~near], rate[~near] = known.network_latency_s, known.network_bytes_per_s
    return [float((latency + sent.reshape(near.shape) / rate).max()) if strategy.ring > 1 else 0.0 for sent in held]


def ring_times(compute: np.ndarray, p2p: Sequence[float], strategy: Strategy, overlap: float) -> RingTimes:
    """A ring, whose ranks wait for their neighbours alone: a fast one runs up to a ring step ahead of the next.

    A ring send begins when both of its ranks have begun the ring step, and the next ring step when this one's kernel
    and the sends to and from the rank are done.

    Args:
        compute: float64[ring steps, P], seconds.
        p2p: Seconds of the ring send during each ring step; the last one's may be left out.
        overlap: Share of the shorter of compute and P2P that hides behind the longer.
    """
    done = began = np.zeros((strategy.ring, strategy.ulysses))
    for step, compute_of_step in enumerate(compute.reshape(-1, *began.shape)):
        done = began + compute_of_step
        if step < len(p2p):
            transfer_s = p2p[step]
            met = np.maximum(began, np.maximum(np.roll(began, 1, axis=0), np.roll(began, -1, axis=0)))
            done = np.maximum(done, met + transfer_s) + (1 - overlap) * np.minimum(compute_of_step, transfer_s)
        began = done
    last = int(done.argmax())
    return RingTimes(float(done.ravel()[last]), float(compute[:, last].sum()))
