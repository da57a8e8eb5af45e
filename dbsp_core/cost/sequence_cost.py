"""Costs of several sequences on a machine, and their layouts in bags.

Ranks with equal counts and constants compute identical results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import block_s
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.comm_dtype import MODEL, CommDtype
from dbsp_core.planning.sequences import SequenceCost, SequencePlan, TokenRuns
from dbsp_core.sources import DenseSource, MaskRequest, MaskSource
from dbsp_core.utils.errors import UserError

_FLOPS_PER_S = 1e15
"""Rate without a machine's constants, for tokens and blocks alike: only the ratio of costs matters."""


@dataclass(frozen=True)
class LayerSize:
    """A layer of a transformer; all layers are equal."""

    heads: int
    head_dim: int
    token_flops: float  # FLOP per token except self-attention's scores and values
    element_bytes: int = 2  # Bytes of a number of q, k and v
    comm_dtype: CommDtype = MODEL  # Communication dtype of q, k, v and the output


def sequence_cost(layer: LayerSize, hardware: Hardware | None, block_q: int = 64, block_k: int = 64) -> SequenceCost:
    """Returns seconds per token and per active block by the machine's constants, or in proportion to FLOP."""
    if hardware is None:
        return SequenceCost(layer.token_flops / _FLOPS_PER_S, 4 * block_q * block_k * layer.head_dim / _FLOPS_PER_S)
    known = hardware.at_blocks(block_q, block_k)
    token_s = layer.token_flops / known.linear_flops_per_s + layer.heads * known.row_s / block_q
    return SequenceCost(token_s, block_s(block_q, block_k, layer.head_dim, known))


WorkOfSizes = dict[MaskRequest, tuple[BlockGrid, np.ndarray]]
"""By mask request: the grid, and active blocks of each row int64[H, nq]."""


@dataclass(frozen=True, eq=False)
class SequenceWork:
    """Work of each sequence's attention, as counts per mask row."""

    grids: tuple[BlockGrid, ...]  # The grid of each sequence
    row_work: tuple[np.ndarray, ...]  # int64[H, nq] each, active blocks by (head, query block)

    @classmethod
    def under(
        cls, source: MaskSource, requests: Sequence[MaskRequest], known: WorkOfSizes, density: float = 1.0
    ) -> SequenceWork:
        """Counts the work of sequences, one request each, under a source's masks. Adds new requests to `known`.

        `density` is assumed for predicted masks. Raises UserError if the source rejects a size.
        """
        grids, rows = [], []
        for request in requests:
            if isinstance(source, DenseSource) or source.changes == "per_call":  # at least one block per row
                grid = source.grid(request)
                work = np.full((request.heads, grid.nq), max(1, round(grid.nk * density)), dtype=np.int64)
            else:
                if request not in known:
                    mask = source.mask(request)
                    known[request] = mask.grid, mask.counts.rows
                grid, work = known[request]
            grids.append(grid)
            rows.append(work)
        return cls(tuple(grids), tuple(rows))

    @property
    def tokens(self) -> np.ndarray:
        """int64[n]"""
        return np.array([grid.tokens for grid in self.grids], dtype=np.int64)

    @property
    def blocks(self) -> np.ndarray:
        """int64[n]: active blocks of all heads."""
        return np.array([int(rows.sum()) for rows in self.row_work], dtype=np.int64)


def whole_layout(plan: SequencePlan, tokens: np.ndarray) -> SequenceLayout:
    """Returns the layout of all sequences (int64[n] tokens) on all ranks, equal to `bag_layout` in each bag."""
    rank, local = plan.runs.positions(tokens)
    return SequenceLayout(rank, local, plan.topology.world, int(local.max()) + 1)


def bag_layout(plan: SequencePlan, tokens: np.ndarray, bag: int) -> SequenceLayout:
    """Returns the layout of a bag's sequences, concatenated in order, on the bag's ranks; `tokens` int64[n] of all.

    Raises UserError for a bag without sequences.
    """
    sequences, runs = np.flatnonzero(plan.bag == bag), plan.runs
    if not len(sequences):
        raise UserError(f"bag {bag} of {plan.topology} has no sequences and no layout; skip it")
    in_bag = np.flatnonzero(np.isin(runs.sequence, sequences))
    number = np.searchsorted(sequences, runs.sequence[in_bag])
    rank = runs.rank[in_bag] - plan.topology.first_rank[bag]
    rank, local = TokenRuns(number, runs.start[in_bag], runs.length[in_bag], rank).positions(tokens[sequences])
    return SequenceLayout(rank, local, int(plan.topology.ranks[bag]), int(local.max()) + 1)
