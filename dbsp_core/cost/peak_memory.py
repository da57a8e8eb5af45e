"""What an attention holds at its peak on each rank, in closed form, and plans that stay within a limit.

Arithmetic on the plan: every rank computes every rank's peak, so all decide alike. DSV (§7.2, constraint a) bounds
its choice of groups by memory in the same place. Counted are the executor's own tensors beside q, k and v, without
kernels' index tables and what the allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from dbsp_core.comm.all_to_all import exchange_q_separately
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan

__all__ = ["MemoryLimit", "chunks_for", "peak_bytes", "within_limit"]


@dataclass(frozen=True)
class MemoryLimit:
    """Most bytes that an attention may hold on any rank at its peak, as all ranks agreed.

    free: whether that is what was free before q, k and v were made; else it is beside them
    """

    size: int
    free: bool = False

    def beside_inputs(self, shape: AttentionShape, layout: SequenceLayout) -> float:
        """Bytes, beside q, k and v themselves."""
        return self.size - (3.0 * shape.heads * layout.shard * shape.token_bytes if self.free else 0.0)


def peak_bytes(
    assignment: Assignment, shape: AttentionShape, layout: SequenceLayout, *, gradients: bool = False
) -> np.ndarray:
    """float64[P]: most bytes that each rank holds at once beside its q, k and v themselves.

    gradients: of a forward pass that keeps what backward needs (see `training.saved_bytes`): packed q, the first slot,
               the output and its log-sum-exp stay until it ends
    Equal to what `scripts/bench/peak_memory.py` counts.
    """
    strategy, grid, token = assignment.strategy, assignment.grid, float(shape.token_bytes)
    traffic, periods = traffic_of(assignment, layout), assignment.periods
    wide = max(4, shape.element_bytes) / shape.element_bytes  # of a running output's bytes over the output's
    rows = traffic.rows * grid.block_q * token
    lse = traffic.rows * grid.block_q * float(shape.batch * max(4, shape.element_bytes))
    if traffic.fetched is None or traffic.fetched_blocks is None:
        slots = np.stack([np.roll(traffic.slots, -period, axis=0).ravel() for period in range(periods)])
        buffers = np.zeros_like(rows)
    else:  # the second chunk's buffers, sent and received, stand beside what is unpacked from them
        slots = np.stack([traffic.slots.ravel(), traffic.fetched_blocks])[:periods]
        buffers = 2 * (traffic.fetched.sum(axis=0) + traffic.fetched.sum(axis=1)) * token
    slots = slots * (2 * grid.block_k * token)  # by period, what a rank computes with
    sent_q, came_q = traffic.queries.sum(axis=1) * token, traffic.queries.sum(axis=0) * token
    sent_kv, came_kv = 2 * traffic.keys.sum(axis=1) * token, 2 * traffic.keys.sum(axis=0) * token
    alone = strategy.world == 1  # then what is sent is what came

    def exchange(sent: np.ndarray, came: np.ndarray) -> np.ndarray:
        return sent if alone else sent + came

    # 1. Dispatch: buffers sent and received; then what came beside what is packed from it.
    if exchange_q_separately(assignment):
        moments = [exchange(sent_q, came_q), came_q + rows]
        moments += [rows + exchange(sent_kv, came_kv), rows + came_kv + slots[0]]
    else:
        moments = [exchange(sent_q + sent_kv, came_q + came_kv), came_q + came_kv + rows + slots[0]]
    # 2. The ring: packed q, the slot in use, the next one, the running output, and in the end the output beside it.
    for period in range(periods):
        first, last = period == 0, period + 1 == periods
        coming = 0.0 if last else slots[period + 1] + buffers
        running = 0.0 if first else rows * wide + lse
        made = rows * (1.0 if last else wide) + lse
        out = made if first else running + made if last and wide > 1 else running
        kept = slots[0] if gradients and not first else 0.0
        moments.append(rows + slots[period] + coming + out + kept)
    # 3. Combine: the output, what is sent of it, what comes, and its place at home.
    kept = rows + slots[0] + rows + lse if gradients else np.zeros_like(rows)
    moments.append((kept if gradients else rows) + came_q)
    moments += [kept + exchange(came_q, sent_q), kept + sent_q + shape.heads * layout.shard * token]
    peak: np.ndarray = np.max(moments, axis=0)
    return peak


def within_limit(plan: Plan, capped: Callable[[int], Plan], peak_of: Callable[[Plan], float], limit: float) -> Plan:
    """The plan where its peak is within the limit; else one whose Ulysses ranks have rows of fewer heads.

    Where heads are few, the rank that owns most rows, those of sparse heads, holds most: with every head of which it
    has a row, that head's keys and values. So the number of such heads on a Ulysses rank is lowered, one at a time,
    until the peak fits, down to equal shares, which cap its rows too. returns: the first plan that fits, or the one
    with the least peak
    capped: plans with at most so many heads on each Ulysses rank;  limit: on what `peak_of` says
    """
    best, least = plan, peak_of(plan)
    if least <= limit:
        return plan
    for most in _caps(plan):
        made = capped(most)
        peak = peak_of(made)
        if peak < least:
            best, least = made, peak
        if least <= limit:
            break
    return best


def _caps(plan: Plan) -> Iterator[int]:
    most = int(plan.assignment.head_ulysses_ranks.sum(axis=0).max())
    return iter(range(most - 1, -(-plan.heads // plan.strategy.ulysses) - 1, -1))


def chunks_for(limit: float | None, beside: np.ndarray, sent: np.ndarray, fetched: np.ndarray, most: int) -> int:
    """In how many parts keys and values that a rank needs of others are to be fetched: the fewest that fit the limit.

    One part arrives beside the kernel on what is there already, and is unpacked; of several, each also while the part
    before it is in use. returns: at least 1, and `most` where even that many don't fit
    limit:   bytes on any rank, or None
    beside:  float64[P], bytes that a rank holds all the while: packed q, the output, what is there already
    sent, fetched: float64[P], bytes of keys and values that it sends and gets in all parts together
    """
    for parts in range(1, most):
        before = 0.0 if parts == 1 else fetched
        held = beside + (np.maximum(before + sent + fetched, before + 2 * fetched)) / parts
        if limit is None or held.max() <= limit:
            return parts
    return most
