"""What training adds to the cost of an attention: its backward's time and bytes, and what is kept between the two.

Arithmetic on the plan, like `dbsp_core.cost.latency`. Backward runs the ring again with the products of
FlashAttention-2's (Dao, 2023, Alg. 2): scores computed again, dP, dV, dQ and dK, five where forward has two.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.comm.all_to_all import exchange_q_separately
from dbsp_core.cost.comm_volume import Traffic, traffic_of
from dbsp_core.cost.hardware import Constants, Hardware
from dbsp_core.cost.latency import (
    MERGE_BYTES,
    AttentionShape,
    Prediction,
    Topology,
    exchange_s,
    fetches_s,
    hand_overs_s,
    require_fit,
    require_network,
)
from dbsp_core.cost.periods import chunk_times, ring_times
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.plan import Plan

__all__ = ["SentBytes", "predict_backward", "saved_bytes", "sent_backward", "sent_forward"]

PRODUCTS = 5
"""Of backward, 2·Bq·Bk·D FLOP for each dense block."""


@dataclass(frozen=True, eq=False)
class SentBytes:
    """What each rank sends to others in one attention, in bytes.

    exchanged:   float64[P], in all-to-alls;  handed_over: float64[P], to its ring neighbour
    """

    exchanged: np.ndarray
    handed_over: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """float64[P]"""
        return self.exchanged + self.handed_over


def sent_forward(plan: Plan, shape: AttentionShape, layout: SequenceLayout) -> SentBytes:
    """q, k and v to owners and the output back; a slot's keys and values y − 1 times."""
    traffic = traffic_of(plan.assignment, layout)
    exchanged = (traffic.queries + sum(traffic.key_exchanges) + traffic.combine) * shape.token_bytes
    return SentBytes(_to_others(exchanged), _handed_over(traffic, plan.assignment.periods - 1) * shape.token_bytes)


def sent_backward(plan: Plan, shape: AttentionShape, layout: SequenceLayout) -> SentBytes:
    """The output's gradient to owners, those of q, k and v back; keys and values y − 1 times, their gradients y times.

    Gradients of q, k and v travel in float32 at least, in which they were summed. Needed keys of further chunks are
    fetched once more.
    """
    traffic, sums = traffic_of(plan.assignment, layout), _gradient_token_bytes(shape)
    there = (traffic.queries + 2 * traffic.keys[1:].sum(axis=0)) * shape.token_bytes
    back = (traffic.queries + sum(traffic.key_exchanges)).T * sums
    periods = plan.assignment.periods
    keys = _handed_over(traffic, periods - 1) * shape.token_bytes
    gradients = _handed_over(traffic, periods if periods > 1 else 0) * sums
    return SentBytes(_to_others(there + back), keys + gradients)


def saved_bytes(plan: Plan, shape: AttentionShape, layout: SequenceLayout) -> np.ndarray:
    """float64[P]: what each rank keeps of one attention from forward to backward, at the owner.

    Packed q and out, rows·Bq·D numbers each; k and v of the first slot, blocks·Bk·D each; the log-sum-exp, rows·Bq.
    Where needed keys come in further chunks, also k and v outside attention.
    With activation checkpointing nothing of it is kept; one layer's is made again in backward.
    """
    traffic, grid = traffic_of(plan.assignment, layout), plan.grid
    numbers = 2 * traffic.rows * grid.block_q + 2 * traffic.blocks[0] * grid.block_k
    if len(traffic.keys) > 1:
        numbers = numbers + 2 * shape.heads * layout.shard
    lse: np.ndarray = traffic.rows * grid.block_q * shape.batch * _gradient_bytes(shape)
    return numbers * float(shape.token_bytes) + lse


def predict_backward(
    plan: Plan,
    shape: AttentionShape,
    hardware: Hardware,
    topology: Topology | None = None,
    layout: SequenceLayout | None = None,
) -> Prediction:
    """As `latency.predict`, of backward. A ring ends with a period that computes nothing: dK and dV's last hand-over.

    In period i the slot's keys and values go on, and beside the same kernel dK and dV of period i − 1.
    Raises UserError as `predict` does.
    """
    strategy, known = plan.strategy, hardware.constants
    topology = topology or Topology(strategy.world, strategy.world)
    layout = layout or SequenceLayout.contiguous(plan.grid.tokens, strategy.world)
    require_fit(plan, shape, topology)
    require_network(hardware, topology)
    traffic, sums, grid = traffic_of(plan.assignment, layout), _gradient_token_bytes(shape), plan.grid
    home = [traffic.dispatch.T * sums]
    if exchange_q_separately(plan.assignment):
        home = [traffic.queries.T * sums, 2 * traffic.keys[0].T * sums]
    exchanged = [traffic.queries * shape.token_bytes, *home]
    if not plan.assignment.keys.lockstep:
        exchanged += [2 * sent.T * sums for sent in traffic.keys[1:]]
        return _predict_chunks(plan, traffic, shape, hardware, topology, layout, exchanged)
    # 1. Compute: products and scores of dense blocks, rows, adding up dQ in each period, dK and dV from the second.
    rank_s = plan.metrics.work * (shape.batch * _block_s(plan, shape, known))
    rank_s += traffic.rows * (shape.batch * known.row_s)
    added = grid.block_q * traffic.rows * np.ones((strategy.ring, 1))
    for period in range(1, strategy.ring):
        added[period] += 2 * grid.block_k * traffic.blocks[period]
    rank_s += added * (shape.batch * shape.head_dim * MERGE_BYTES / known.merge_bytes_per_s)
    rank_s += known.launch_s
    # 2. Hand-overs: keys and values in all periods but the last, gradients in all but the first, and at the end.
    block, ring = 2 * grid.block_k, strategy.ring
    keys = hand_overs_s(strategy, traffic.blocks[:-1] * (block * shape.token_bytes), known, topology)
    gradients = hand_overs_s(strategy, traffic.blocks * (block * sums), known, topology)
    p2p: list[float] = []
    if ring > 1:
        p2p = (np.array([*keys, 0.0, 0.0]) + np.array([0.0, *gradients])).tolist()
        rank_s = np.vstack([rank_s, np.zeros(strategy.world)])
    # 3. Packing: dOut and the packed one in the model's dtype, the gradients of q, k and v on both sides in theirs.
    at_home, rows = shape.heads * layout.shard, traffic.rows * grid.block_q
    numbers = at_home + rows, 3 * at_home + rows + 2 * traffic.blocks[0] * grid.block_k
    packed = float((numbers[0] * shape.token_bytes + numbers[1] * sums).max())
    return Prediction(
        exchange_s=sum(exchange_s(tokens, known, topology) for tokens in exchanged),
        times=ring_times(rank_s, p2p, strategy, known.overlap),
        pack_s=packed / known.pack_bytes_per_s,
        launch_s=known.call_s,
    )


def _predict_chunks(
    plan: Plan,
    traffic: Traffic,
    shape: AttentionShape,
    hardware: Hardware,
    topology: Topology,
    layout: SequenceLayout,
    exchanged: list[np.ndarray],
) -> Prediction:
    """Of needed keys: further chunks are fetched again beside kernels; gradients go home at the end.

    exchanged: float64[P, P] each, bytes beside no kernel
    """
    known, grid, sums = hardware.constants, plan.grid, _gradient_token_bytes(shape)
    rank_s = plan.metrics.work * (shape.batch * _block_s(plan, shape, known)) + known.launch_s
    rank_s += traffic.rows * (shape.batch * known.row_s)
    rank_s += traffic.rows * (grid.block_q * shape.batch * shape.head_dim * MERGE_BYTES / known.merge_bytes_per_s)
    at_once = plan.assignment.keys.at_once
    keys = np.sum([sent.sum(axis=0) + sent.sum(axis=1) for sent in traffic.key_exchanges], axis=0)
    fetched = np.sum([sent.sum(axis=1) for sent in traffic.key_exchanges[1:]], axis=0) * shape.token_bytes
    rows = shape.heads * layout.shard + traffic.rows * grid.block_q
    packed = float((rows * (shape.token_bytes + sums) + keys * sums + fetched).max())
    return Prediction(
        exchange_s=sum(exchange_s(tokens, known, topology) for tokens in exchanged),
        times=chunk_times(rank_s, fetches_s(traffic, shape, known, topology), known.overlap, at_once),
        pack_s=packed / known.pack_bytes_per_s,
        launch_s=known.call_s,
    )


def _block_s(plan: Plan, shape: AttentionShape, known: Constants) -> float:
    per_score = 2 * PRODUCTS * shape.head_dim / known.flops_per_s + known.score_s
    return plan.grid.block_q * plan.grid.block_k * per_score


def _gradient_bytes(shape: AttentionShape) -> int:
    """Of one number of dQ, dK, dV or the log-sum-exp."""
    return max(4, shape.element_bytes)


def _gradient_token_bytes(shape: AttentionShape) -> int:
    return shape.batch * shape.head_dim * _gradient_bytes(shape)


def _to_others(sent: np.ndarray) -> np.ndarray:
    others: np.ndarray = sent.sum(axis=1) - sent.diagonal()
    return others


def _handed_over(traffic: Traffic, count: int) -> np.ndarray:
    """float64[P]: tokens of keys and values that each rank hands on in the first `count` periods, where any are."""
    if len(traffic.keys) == len(traffic.blocks):
        return np.zeros(len(traffic.rows))
    handed_over: np.ndarray = 2.0 * traffic.block_k * traffic.blocks[:count].sum(axis=0)
    return handed_over
