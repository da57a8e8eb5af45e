"""What an attention holds at its peak on each rank, in closed form, and plans that stay within a limit.

Arithmetic on the plan: every rank computes every rank's peak, so all decide alike. DSV (§7.2, constraint a) bounds
its choice of groups by memory in the same place. Counted are the executor's own tensors beside q, k and v, without
kernels' index tables and what the allocator rounds up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dbsp_core.comm.all_to_all import exchange_q_separately
from dbsp_core.cost.comm_volume import traffic_of
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.assignment import Assignment
from dbsp_core.planning.plan import Plan
from dbsp_core.planning.wire_format import MODEL
from dbsp_kernels.prediction.block_selection import pairs_at_once

__all__ = ["MemoryLimit", "head_caps", "mask_bytes", "peak_bytes", "prediction_bytes", "within_limit"]


@dataclass(frozen=True)
class MemoryLimit:
    """Most bytes that an attention may hold on any rank at its peak, as all ranks agreed.

    Attributes:
        free: Whether that is what was free before q, k and v were made; else it is beside them.
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

    Equal to what `scripts/bench/peak_memory.py` counts.

    Args:
        gradients: Of a forward pass that keeps what backward needs (see `training.saved_bytes`): packed q, the first
            slot, the output and its log-sum-exp stay until it ends.
    """
    strategy, grid, token = assignment.strategy, assignment.grid, float(shape.token_bytes)
    wire, sent = assignment.wire, float(shape.sent_bytes(assignment.wire))
    apart = wire is not MODEL  # then what came is read into tensors of their own
    traffic, periods = traffic_of(assignment, layout), assignment.periods
    wide = max(4, shape.element_bytes) / shape.element_bytes  # of a running output's bytes over the output's
    rows = traffic.rows * grid.block_q * token
    lse = traffic.rows * grid.block_q * float(shape.batch * max(4, shape.element_bytes))
    # Buffers of exchanges in flight, sent and received, stand beside what is unpacked from the first to come.
    buffers, further = np.zeros((periods - 1, len(rows))), traffic.keys[1:]
    buffers[: len(further)] = 2 * (further.sum(axis=1) + further.sum(axis=2)) * sent
    if assignment.keys.at_once:
        buffers = buffers[::-1].cumsum(axis=0)[::-1]
    slots = traffic.blocks * (2.0 * grid.block_k)  # by period, tokens of what a rank computes with
    came_slots, read_slots = slots * sent, slots * token
    came_rows = traffic.rows * grid.block_q * sent
    sent_q, came_q = (traffic.queries.sum(axis=axis) * sent for axis in (1, 0))
    sent_kv, came_kv = (2 * traffic.keys[0].sum(axis=axis) * sent for axis in (1, 0))
    alone = strategy.world == 1  # then what is sent is what came

    def exchange(sent: np.ndarray, came: np.ndarray) -> np.ndarray:
        return sent if alone else sent + came

    # 1. Dispatch: buffers sent and received; then what came beside what is packed from it.
    if exchange_q_separately(assignment):
        moments = [exchange(sent_q, came_q), came_q + came_rows]
        moments += [came_rows + exchange(sent_kv, came_kv), came_rows + came_kv + came_slots[0]]
    else:
        moments = [exchange(sent_q + sent_kv, came_q + came_kv), came_q + came_kv + came_rows + came_slots[0]]
    if apart:
        moments.append(came_rows + came_slots[0] + rows)
    # 2. The ring: packed q, the slot in use, the next one, the running output, and in the end the output beside it.
    for period in range(periods):
        first, last = period == 0, period + 1 == periods
        coming = 0.0 if last else came_slots[period + 1] + buffers[period]
        running = 0.0 if first else rows * wide + lse
        made = rows * (1.0 if last else wide) + lse
        out = made if first else running + made if last and wide > 1 else running
        kept = read_slots[0] if gradients and not first else 0.0
        handed_on = came_slots[period] if apart and assignment.keys.lockstep and not last else 0.0
        moments.append(rows + read_slots[period] + handed_on + coming + out + kept)
        if apart:  # what is fetched is in its buffers yet
            in_flight = coming if assignment.keys.lockstep or last else buffers[period]
            moments.append(rows + came_slots[period] + read_slots[period] + in_flight + running)
    # 3. Combine: the output, what is sent of it, what comes, and its place at home.
    kept = rows + read_slots[0] + rows + lse if gradients else np.zeros_like(rows)
    sent_out, came_out = (traffic.combine.sum(axis=axis) * token for axis in (1, 0))
    moments.append((kept if gradients else rows) + sent_out)
    moments += [kept + exchange(sent_out, came_out), kept + came_out + shape.heads * layout.shard * token]
    peak: np.ndarray = np.max(moments, axis=0)
    return peak


def mask_bytes(grid: BlockGrid, heads: int) -> float:
    """A predicted mask's bits, which every rank has of all heads while their attention runs."""
    return float(sum(heads * of.nq * 8 * -(-of.nk // 8) for of in _sequences(grid)))


def prediction_bytes(grid: BlockGrid, shape: AttentionShape, ranks: int, on_gpu: bool) -> float:
    """Most bytes that a rank holds at once while it predicts a mask (SpargeAttn's), beside q, k and v.

    That is before any of them travels, so it stands not beside `peak_bytes`: the larger of the two counts.
    """
    own, most = -(-shape.heads // ranks), 0.0
    for of in _sequences(grid):
        pairs, at_once = of.nq * of.nk, pairs_at_once(on_gpu)
        scored = pairs * min(own, max(1, at_once // pairs))
        chosen = scored if pairs <= at_once else of.nk * max(1, at_once // of.nk)
        pooled = own * (of.nq + of.nk) * (shape.head_dim + 1) * 4
        packed = shape.heads * of.nq * -(-of.nk // 8)
        # 1. A rank's own heads: scores in float64, and some rows' chances, which torch sorts and adds up.
        choosing = pooled + 8 * scored + (8 if on_gpu else 33) * chosen + packed / ranks
        # 2. All heads' bits: as gathered, in order, and unpacked.
        most = max(most, choosing, 2 * packed + mask_bytes(of, shape.heads))
    return most


def _sequences(grid: BlockGrid) -> tuple[BlockGrid, ...]:
    return tuple(grid.sequences) if grid.packed_from else (grid,)


def within_limit(plans: Iterable[Plan], excess: Callable[[Plan], float]) -> Plan:
    """The first of some plans that fits, or the one with the least peak.

    Args:
        excess: Bytes by which a plan's peak is above a limit.
    """
    best, least = None, float("inf")
    for plan in plans:
        above = excess(plan)
        if best is None or above < least:
            best, least = plan, above
        if least <= 0:
            break
    if best is None:
        raise ValueError("within_limit needs at least one plan")
    return best


def head_caps(plan: Plan) -> range:
    """Numbers of heads to cap a Ulysses rank's rows at, one less each time, down to equal shares.

    Where heads are few, the rank that owns most rows, those of sparse heads, holds most: with every head of which it
    has a row, that head's keys and values. A cap on such heads caps its rows too.
    """
    most = int(plan.assignment.head_ulysses_ranks.sum(axis=0).max())
    return range(most - 1, -(-plan.heads // plan.strategy.ulysses) - 1, -1)
