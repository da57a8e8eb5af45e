"""Measurements of `dbsp bench`, on all ranks together, and the latency model's constants that explain the times.

Compared runs are interleaved, so that a drifting clock affects all of them. A time is the slowest rank's, median over
the turns: by CUDA events on GPUs, by the clock on a CPU.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.process_groups import meet
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import MERGE_BYTES, AttentionShape, Prediction, predict
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.planning.plan import Plan, make_plan, usual_layout
from dbsp_core.runtime.attention import DualBalancedAttention
from dbsp_core.runtime.tables import KernelTable, build_tables, table_layout
from dbsp_kernels import KERNELS, PartialAttention, block_attention, merge_states

DENSITIES = (0.1, 0.25, 0.5, 1.0)
"""Shares of active blocks at which the kernel is timed."""
SPARSE = 0.25
"""The share at which kernels, and whole attentions, are compared."""
_PLAIN = "contiguous"

Action = Callable[[], object]


def imbalanced_mask(heads: int, grid: BlockGrid, density: float, seed: int = 0, slope: float = 0.5) -> BlockMask:
    """Makes random blocks; heads, rows and columns grow denser from first to last, so contiguous plans are imbalanced.

    Args:
        density: In the middle. 1: all blocks.
        slope: The last is (1 + slope) times as dense as the middle, the first (1 − slope) times.
    """
    if density == 1:
        return BlockMask.dense(heads, grid)
    rng = np.random.default_rng(seed)
    bits = np.empty((heads, grid.nq, grid.nk), dtype=bool)
    head, row, column = (np.linspace(1 - slope, 1 + slope, n, dtype=np.float32) for n in bits.shape)
    for h in range(heads):
        bits[h] = rng.random(bits.shape[1:], dtype=np.float32) < density * head[h] * row[:, None] * column
    return BlockMask(torch.from_numpy(bits), grid)


@dataclass(frozen=True)
class Workload:
    """One model's attention, and the ranks that it is measured on.

    Attributes:
        blocks: Tokens of a query block and of a KV block.
        kernel: The kernel that attentions are timed with.
        sizes: Bytes that a rank sends, for the rates of exchanges.
        repeats: Turns.
    """

    heads: int
    head_dim: int
    tokens: int
    blocks: tuple[int, int]
    kernel: str
    dtype: torch.dtype
    device: torch.device
    group: SequenceGroup
    sizes: tuple[int, ...]
    repeats: int

    @property
    def own_heads(self) -> int:
        """Heads of one rank without a ring."""
        return max(1, self.heads // self.group.size)

    def mask(self, heads: int, density: float, tokens: int = 0, blocks: tuple[int, int] | None = None) -> BlockMask:
        """Makes an imbalanced mask, of all tokens and the model's blocks if nothing else is given."""
        return imbalanced_mask(heads, BlockGrid(tokens or self.tokens, 0, *(blocks or self.blocks)), density)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def gathered(self, value: Any) -> list[Any]:
        """Returns every rank's value. Collective."""
        found = [value] * self.group.size
        if self.group.size > 1:
            dist.all_gather_object(found, value)
        return found

    def medians(self, actions: Mapping[str, Action]) -> dict[str, float]:
        """Returns seconds of each action. Collective: all ranks begin each one together."""
        for action in [*actions.values()] * 2:
            action()
        found: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(self.repeats):
            for name, action in actions.items():
                found[name].append(self._seconds(action))
        by_rank = self.gathered(found)
        return {name: float(np.median(np.max([one[name] for one in by_rank], axis=0))) for name in actions}

    def _seconds(self, action: Action) -> float:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()
        if self.group.size > 1:
            meet()
        if not on_gpu:
            start = time.perf_counter()
            action()
            return time.perf_counter() - start
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        action()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


class Rows(NamedTuple):
    """All rows of some heads, as a kernel is given them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: KernelTable
    tokens: int

    @classmethod
    def from_mask(cls, work: Workload, mask: BlockMask) -> Rows:
        grid = mask.grid
        layout = table_layout(make_plan(mask, "U1R1", _PLAIN), 0).to(work.device)
        table = build_tables(layout, mask)[0].expanded()
        q = work.random(len(table.kv_count), grid.block_q, work.head_dim)
        k, v = (work.random(len(table.kv_len), grid.block_k, work.head_dim) for _ in range(2))
        return cls(q, k, v, table, grid.tokens)

    def attend(self, kernel: str) -> PartialAttention:
        whole: dict[str, Any] = {} if KERNELS[kernel].returns_lse else {"head_tokens": self.tokens, "lse": False}
        return block_attention(self.q, self.k, self.v, **vars(self.table), kernel=kernel, **whole)

    def error(self, kernel: str, rows: int = 16) -> float:
        """Returns the relative error of the first rows and the last against float64; NaN if any is not finite."""
        out, _ = self.attend(kernel)
        order = self.table.row_schedule
        picked = torch.cat([order[: rows // 2], order[-(rows // 2) :]]).long()
        table = {name: getattr(self.table, name)[picked] for name in ("kv_index", "kv_count")}
        wide = (self.q[picked].double(), self.k.double(), self.v.double())
        expected, _ = block_attention(*wide, **table, kv_len=self.table.kv_len, kernel="reference")
        error = float((out[picked].double() - expected).norm() / expected.norm())
        return error if bool(out.isfinite().all()) else float("nan")


@dataclass(frozen=True)
class Attention:
    """One whole attention on all ranks: q, k and v to their owners, the kernel, the outputs back.

    Attributes:
        plan: Its plan, with ρ_s.
    """

    density: float
    plan: Plan
    seconds: float
    predicted_s: float = float("nan")


@dataclass(frozen=True)
class Measured:
    """Times of attention and exchanges, and the constants fitted to them.

    Attributes:
        dense_s: Dense attention of a rank's heads by torch.
        by_density: Seconds of the kernel on a rank's heads, by share of active blocks.
        exchanges: Seconds of "exchange" (all-to-all) and "p2p" (to the next rank), by bytes that a rank sends.
        constants: Those of the latency model; another machine's where nothing was measured, or too short to see.
        residual: Largest relative error of the fits, by part.
    """

    dense_s: float
    by_density: dict[float, float]
    exchanges: dict[str, dict[int, float]]
    attentions: list[Attention]
    constants: Constants
    residual: dict[str, float]


def measure(work: Workload, others: Constants, say: Callable[[str], None]) -> Measured:
    """Measures an attention's parts, and whole attentions. Collective.

    Args:
        others: Another machine's constants, for what is not measured: exchanges, if there is one rank.
        say: Called with a text about the current measurement.
    """
    # 1. Parts of an attention.
    say("dense and sparse attention of one rank")
    residual: dict[str, float] = {}
    dense_s, by_density, known = _measure_compute(work, others, residual)
    exchanges: dict[str, dict[int, float]] = {}
    if work.group.size > 1:
        say("exchanges")
        exchanges = _measure_exchanges(work)
        known = replace(known, **_exchange_constants(exchanges, others, residual))
    known = _measure_calls(work, known, others, residual)
    # 2. Whole attentions.
    say("whole attentions, balanced and unbalanced")
    attentions = _measure_attentions(work)
    ring = [one for one in attentions if one.plan.planner == _PLAIN and one.plan.strategy.ring > 1]
    if ring:
        known = replace(known, overlap=_fit_overlap(work, ring, known))
    attentions = [replace(one, predicted_s=_predict(work, one.plan, known).total_s) for one in attentions]
    return Measured(dense_s, by_density, exchanges, attentions, known, residual)


def _measure_compute(
    work: Workload, others: Constants, residual: dict[str, float]
) -> tuple[float, dict[float, float], Constants]:
    """Times attention without exchanges, merging and a matrix product; returns the constants, exchanges as in others.

    The time of a score's softmax is in that of the products: one head dim cannot separate them.
    """
    heads, few = work.own_heads, max(work.blocks[0], work.tokens // 4)
    masks = {str(density): work.mask(heads, density) for density in DENSITIES}
    masks["few"] = work.mask(heads, SPARSE, few)
    rows = {name: Rows.from_mask(work, mask) for name, mask in masks.items()}
    q, k, v = (work.random(1, heads, work.tokens, work.head_dim) for _ in range(3))
    width = work.heads * work.head_dim
    left, right = work.random(-(-work.tokens // work.group.size), width), work.random(width, width)
    elements = heads * work.tokens * work.head_dim
    out, part = (torch.randn(heads * work.tokens // 64, 64, work.head_dim, device=work.device) for _ in range(2))
    lse, part_lse = (torch.randn(out.shape[:2], device=work.device) for _ in range(2))
    seconds = work.medians(
        {name: lambda one=one: one.attend(work.kernel) for name, one in rows.items()}
        | {
            "dense": lambda: F.scaled_dot_product_attention(q, k, v),
            "linear": lambda: left @ right,
            "merge": lambda: merge_states(out, lse, part, part_lse),
        }
    )
    flops = [4.0 * int(mask.bits.sum()) * np.prod(work.blocks) * work.head_dim for mask in masks.values()]
    columns = np.array([[flop, len(one.q), 1.0] for flop, one in zip(flops, rows.values(), strict=True)])
    (per_flop, row_s, launch_s), residual["compute"] = fit(columns, np.array([seconds[name] for name in masks]))
    constants = replace(
        others,
        flops_per_s=_rate(per_flop, others.flops_per_s),
        score_s=0.0,
        row_s=row_s,
        launch_s=launch_s,
        call_s=0.0,
        pack_bytes_per_s=1.0,
        merge_bytes_per_s=elements * MERGE_BYTES / seconds["merge"],
        overlap=1.0,
        linear_flops_per_s=2.0 * len(left) * width**2 / seconds["linear"],
        serial_s=0.0,
        network_latency_s=None,
        network_bytes_per_s=None,
    )
    return seconds["dense"], {density: seconds[str(density)] for density in DENSITIES}, constants


def _measure_exchanges(work: Workload) -> dict[str, dict[int, float]]:
    actions: dict[str, Action] = {}
    for size in work.sizes:
        actions[f"exchange {size}"] = _exchange(size, work)
        actions[f"p2p {size}"] = _rotate(size, work)
    seconds = work.medians(actions)
    return {part: {size: seconds[f"{part} {size}"] for size in work.sizes} for part in ("exchange", "p2p")}


def _exchange(size: int, work: Workload) -> Action:
    """Returns an all-to-all in which each rank sends `size` bytes to the others together, and nothing to itself."""
    group = work.group
    each = max(1, size // 4 // (group.size - 1))
    splits = [0 if rank == group.rank else each for rank in range(group.size)]
    sent = torch.zeros(sum(splits), device=work.device)
    return lambda: group.all_to_all(sent, splits, splits)


def _rotate(size: int, work: Workload) -> Action:
    """Returns a call that sends `size` bytes to the next rank, and receives as many from the one before."""
    sent = torch.zeros(max(1, size // 4), device=work.device)
    received = torch.empty_like(sent)
    before, after = ((work.group.rank + way) % work.group.size for way in (-1, 1))
    both = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, received, before)]
    return lambda: [one.wait() for one in dist.batch_isend_irecv(both)]


def _exchange_constants(
    exchanges: Mapping[str, Mapping[int, float]], others: Constants, residual: dict[str, float]
) -> dict[str, float]:
    known: dict[str, float] = {}
    for part, seconds in exchanges.items():
        columns = np.array([[1.0, size] for size in seconds])
        (latency, per_byte), residual[part] = fit(columns, np.array([*seconds.values()]))
        rate = f"{part}_bytes_per_s"
        known |= {f"{part}_latency_s": latency, rate: _rate(per_byte, getattr(others, rate))}
    return known


def _measure_calls(work: Workload, known: Constants, others: Constants, residual: dict[str, float]) -> Constants:
    """Fits packing and bookkeeping: what an attention without active blocks takes beyond its exchange and rows."""
    strategy = Strategy(work.group.size, 1)
    sizes = [work.tokens // part // work.group.size * work.group.size for part in (1, 2, 4)]
    wholes = [_whole(work, work.mask(work.heads, 0.0, size), strategy, _PLAIN) for size in sizes]
    seconds = work.medians({str(size): call for size, (_, call) in zip(sizes, wholes, strict=True)})
    predicted = [_predict(work, plan, known) for plan, _ in wholes]
    columns = np.array([[one.pack_s, 1.0] for one in predicted])
    given = np.array([one.total_s - one.pack_s for one in predicted])
    (per_byte, call_s), residual["call"] = fit(columns, np.array([*seconds.values()]), given)
    return replace(known, pack_bytes_per_s=_rate(per_byte, others.pack_bytes_per_s), call_s=call_s)


def _measure_attentions(work: Workload) -> list[Attention]:
    """Times whole attentions: dense Ulysses, and the sparse mask on Ulysses and Ring, unbalanced and balanced."""
    ranks = work.group.size
    runs: list[tuple[float, Strategy, str]] = [(1.0, Strategy(ranks, 1), _PLAIN)]
    for strategy in dict.fromkeys((Strategy(ranks, 1), Strategy(1, ranks))):
        runs += [(SPARSE, strategy, planner) for planner in (_PLAIN, "dbsp")]
    masks = {density: work.mask(work.heads, density) for density in (1.0, SPARSE)}
    wholes = [_whole(work, masks[density], strategy, planner) for density, strategy, planner in runs]
    seconds = work.medians({str(number): call for number, (_, call) in enumerate(wholes)})
    densities = [masks[density].density for density, *_ in runs]
    plans = [plan for plan, _ in wholes]
    return [Attention(*one) for one in zip(densities, plans, seconds.values(), strict=True)]


def _whole(work: Workload, mask: BlockMask, strategy: Strategy, planner: str) -> tuple[Plan, Action]:
    """Prepares an attention; returns its plan, and a call of it on this rank's random q, k, v."""
    layout = usual_layout(planner, mask.grid, strategy)
    plan = make_plan(mask, strategy, planner, layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, work.group, device=work.device, kernel=work.kernel)
    q, k, v = (work.random(1, mask.heads, layout.shard, work.head_dim) for _ in range(3))
    return plan, lambda: attend(q, k, v)


def _predict(work: Workload, plan: Plan, known: Constants) -> Prediction:
    shape = AttentionShape(1, plan.heads, work.head_dim, work.dtype.itemsize)
    labels = {key: "measured" for key, value in vars(known).items() if value is not None}
    machine = Hardware("being measured", "", "", known, labels)
    return predict(plan, shape, machine, layout=usual_layout(plan.planner, plan.grid, plan.strategy))


def _fit_overlap(work: Workload, ring: Sequence[Attention], known: Constants) -> float:
    """Fits how far compute hides P2P: 1 is max(compute, P2P), 0 their sum; 1 where it makes no difference."""
    seconds = np.array([one.seconds for one in ring])
    hidden, apart = (
        np.array([_predict(work, one.plan, replace(known, overlap=overlap)).total_s for one in ring])
        for overlap in (1.0, 0.0)
    )
    gap = (apart - hidden) / seconds
    if not gap.any():
        return 1.0
    return float(np.clip((gap * (apart - seconds) / seconds).sum() / (gap**2).sum(), 0, 1))


def fit(columns: np.ndarray, seconds: np.ndarray, given: np.ndarray | float = 0.0) -> tuple[tuple[float, ...], float]:
    """Finds the coefficients ≥ 0 with the least sum of squared relative errors, one per column.

    Every set of coefficients that are not zero is tried: exact, and there are few.

    Args:
        columns: float64[samples, n], samples ≥ n.
        seconds: float64[samples] > 0.
        given: float64[samples], seconds that are explained already.

    Returns:
        The coefficients, and the largest relative error.
    """
    samples, n = columns.shape
    scaled, wanted = columns / seconds[:, None], np.ones(samples) - given / seconds
    norms = np.linalg.norm(scaled, axis=0)
    scaled = scaled / np.where(norms > 0, norms, 1)
    best, least = np.zeros(n), np.inf
    for size in range(1, n + 1):
        for chosen in itertools.combinations(range(n), size):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], wanted, rcond=None)
            loss = float(((scaled[:, chosen] @ found - wanted) ** 2).sum())
            if (found >= 0).all() and loss < least - 1e-12:
                best, least = np.zeros(n), loss
                best[list(chosen)] = found
    errors = scaled @ best - wanted
    return tuple((best / np.where(norms > 0, norms, 1)).tolist()), float(np.abs(errors).max())


def _rate(seconds_per_unit: float, otherwise: float) -> float:
    """Returns units per second, or another machine's where the time was too short to see."""
    return 1 / seconds_per_unit if seconds_per_unit > 0 else otherwise
