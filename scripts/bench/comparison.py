"""Measured: what balancing is worth for one attention, on real ranks or replayed on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from dbsp_cli.calibrate.cases import Case
from dbsp_cli.calibrate.measure import Setting, measure_attentions
from dbsp_cli.calibrate.timing import Samples, Timer, run_ranks, undisturbed_samples
from dbsp_cli.simulate import ELEMENT_BYTES
from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import require_planner
from dbsp_core.runtime.kernel_tables import build_tables, table_layout
from dbsp_kernels import block_attention

__all__ = ["Comparison", "compare", "core_seconds", "replay", "replayed_seconds"]

PLANNERS = ("contiguous", "dbsp")


@dataclass(frozen=True)
class Comparison:
    """One attention under two plans.

    rho_before, rho:         ρ_s of the contiguous plan and of planner "dbsp"
    seconds_before, seconds: wall time, or with --replay Σ over periods of the slowest virtual rank's compute
    core_seconds_before, core_seconds: time on a core of the busiest rank; 0 where it was not taken
    communication_before_s, communication_s: modelled, beside a replay; 0 where seconds hold it
    """

    strategy: str
    rho_before: float
    rho: float
    seconds_before: float
    seconds: float
    core_seconds_before: float = 0.0
    core_seconds: float = 0.0
    communication_before_s: float = 0.0
    communication_s: float = 0.0

    @property
    def speedup(self) -> float:
        return self.seconds_before / self.seconds

    @property
    def core_speedup(self) -> float:
        return self.core_seconds_before / self.core_seconds if self.core_seconds else 0.0

    @property
    def expected(self) -> float:
        """ρ_s before over ρ_s after: the speed-up if nothing but blocks took time."""
        return self.rho_before / self.rho

    @property
    def reached(self) -> float:
        """The speed-up over what is expected of it."""
        return self.speedup / self.expected

    def record(self) -> dict[str, object]:
        """For JSON."""
        derived = {"speedup": self.speedup, "expected": self.expected, "reached": self.reached}
        return asdict(self) | derived | {"core_speedup": self.core_speedup}


def compare(
    cases: Sequence[Case], ranks: int, device: str, repeats: int, kernel: str = "auto", max_wait_s: float = 0.0
) -> list[Comparison]:
    """Every case on Ulysses and on Ring, each with both planners, all in turns in one run on real ranks.

    cases: the first for Ulysses, the second for Ring
    """
    strategies = (Strategy(ranks, 1), Strategy(1, ranks))
    ways = [(case, str(one), planner) for case, one in zip(cases, strategies, strict=True) for planner in PLANNERS]
    setting = Setting(device, torch.bfloat16 if device == "cuda" else torch.float32, kernel, repeats, max_wait_s)
    by_rank = run_ranks(measure_attentions, ranks, device, tuple(ways), setting)
    laps = list(zip(*by_rank, strict=True))
    found = []
    for number, (case, strategy) in enumerate(zip(cases, strategies, strict=True)):
        pair = laps[2 * number : 2 * number + 2]
        seconds = [float(np.median(undisturbed_samples(one))) for one in pair]
        plan = _plan(case.mask(), strategy, "dbsp")[0]
        core = [core_seconds(one) for one in pair]
        found.append(Comparison(str(strategy), plan.rho_before, plan.rho, *seconds, *core))
    return found


def core_seconds(by_rank: Sequence[Samples]) -> float:
    """Seconds on a core of the busiest rank, median over repetitions."""
    return float(np.median(np.asarray(by_rank, dtype=np.float64)[..., 2].max(axis=0)))


def _plan(mask: BlockMask, strategy: Strategy, planner: str) -> tuple[Plan, SequenceLayout]:
    layout = SequenceLayout.named(require_planner(planner).layout, mask.grid, strategy)
    return make_plan(mask, strategy, planner, layout=layout), layout


def replay(
    cases: Sequence[Case], gpus: int, device: str, repeats: int, kernel: str, hardware: Hardware
) -> list[Comparison]:
    """Every strategy of `gpus` virtual ranks on the first case: each rank's rows are run one after the other.

    hardware: models the communication, which is shown apart
    """
    if device == "cpu":
        torch.set_num_threads(1)  # one core per rank, as real ranks have
    case, mask = cases[0], cases[0].mask()
    setting = Setting(device, torch.bfloat16 if device == "cuda" else torch.float32, kernel, repeats)
    dtype = str(setting.dtype).removeprefix("torch.")
    shape = AttentionShape(1, case.heads, case.tokens, case.head_dim, ELEMENT_BYTES[dtype])
    found = []
    for strategy in Strategy.all_for(gpus):
        before, after = (_plan(mask, strategy, planner) for planner in PLANNERS)
        seconds = replayed_seconds((before[0], after[0]), mask, case.head_dim, setting)
        communication = []
        for plan, layout in (before, after):
            predicted = predict(plan, shape, hardware, layout=layout)
            communication.append(predicted.exchange_s + sum(p2p for _, p2p in predicted.times.periods))
        found.append(
            Comparison(
                str(strategy),
                rho_before=after[0].rho_before,
                rho=after[0].rho,
                seconds_before=seconds[0],
                seconds=seconds[1],
                communication_before_s=communication[0],
                communication_s=communication[1],
            )
        )
    return found


def replayed_seconds(plans: Sequence[Plan], mask: BlockMask, head_dim: int, setting: Setting) -> list[float]:
    """Of each plan: Σ over periods of the slowest virtual rank's kernel time, medians, the plans in turns."""
    timer = Timer(setting.device)
    found = [np.zeros((plan.strategy.ring, plan.strategy.world)) for plan in plans]
    for rank in range(plans[0].strategy.world):
        for period in range(plans[0].strategy.ring):
            actions = [_rank_period(plan, mask, rank, period, head_dim, setting) for plan in plans]
            laps: list[list[float]] = [[] for _ in plans]
            for turn in range(setting.repeats):
                for mine, action in zip(laps, actions, strict=True):
                    mine += [seconds for seconds, *_ in timer.samples_alone(action, 1, warm_up=int(turn == 0))]
            for times, mine in zip(found, laps, strict=True):
                times[period, rank] = np.median(mine)
    return [float(times.max(axis=1).sum()) for times in found]


def _rank_period(
    plan: Plan, mask: BlockMask, rank: int, period: int, head_dim: int, setting: Setting
) -> Callable[[], object]:
    """The kernel on what `rank` computes in `period`, on random numbers."""
    table = build_tables(table_layout(plan.assignment, rank).to(torch.device(setting.device)), mask)[period]
    q = torch.randn(len(table.kv_count), plan.grid.block_q, head_dim, **setting.where)
    k, v = (torch.randn(len(table.kv_len), plan.grid.block_k, head_dim, **setting.where) for _ in range(2))
    return lambda: block_attention(q, k, v, **vars(table.expanded()), kernel=setting.kernel)
