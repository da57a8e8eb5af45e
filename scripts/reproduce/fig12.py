"""Fig. 12: the reward R_b of the paper's planner against ρ_s and the bytes that all ranks move, Q, K and V counted.

The paper shows the trade-off as a curve without numbers, and its text has one limit. The authors' scripts use R_b = 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from matplotlib.figure import Figure

from dbsp_core.reports.style import INK
from scripts.reproduce.common import MEASURED, arguments, masks
from scripts.reproduce.lockstep import RingPlan, plan_ring, rho_before
from scripts.results.colours import STRATEGIES as COLOURS
from scripts.results.figures import imbalance_axis, in_words, legend_below, panels
from scripts.results.result import Result, Row

PRESET = "wan2.1-t2v-14b"
STRATEGIES = ("U1R8", "U2R4", "U4R2")
REWARDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
HEAD_DIM, BYTES_PER_ELEMENT = 128, 2  # Wan2.1-T2V-14B in bfloat16
PAPER_LIMIT = 1.05


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Means over layers. moved: share of all ranks' Q, K, V that changes ring rank; moved_mb: in 10⁶ bytes"""
    plans: dict[tuple[str, float], list[RingPlan]] = {}
    before: dict[str, list[float]] = {}
    for mask in masks(PRESET, options):
        for strategy in STRATEGIES:
            before.setdefault(strategy, []).append(rho_before(mask, strategy))
            for reward in REWARDS:
                plan = plan_ring(mask, strategy, "paper", reward=reward)
                plans.setdefault((strategy, reward), []).append(plan)
    for (strategy, reward), of_reward in plans.items():
        moved = float(np.mean([plan.moved for plan in of_reward]))
        elements = 3 * of_reward[0].heads * of_reward[0].grid.tokens * HEAD_DIM
        yield Row(
            preset=PRESET,
            strategy=strategy,
            reward=reward,
            rho=float(np.mean([plan.rho for plan in of_reward])),
            rho_before=float(np.mean(before[strategy])),
            moved=moved,
            moved_mb=moved * elements * BYTES_PER_ELEMENT / 1e6,
            paper_rho=f"≤ {PAPER_LIMIT} (§4.2.2)" if strategy == "U1R8" else "–",
            label=f"ρ_s and share {MEASURED}; bytes modelled from the share",
            layers=len(of_reward),
        )


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "Paper's planner: what does its reward R_b trade?",
        f"{in_words(rows[0].preset)}, 8 GPUs; ρ_s {MEASURED}, bytes modelled from the share that moves",
        columns=2,
    )
    left, right = axes[0]
    for strategy in STRATEGIES:
        here, colour = [row for row in rows if row.strategy == strategy], COLOURS[strategy]
        left.plot([row.reward for row in here], [row.rho for row in here], "o-", color=colour, label=strategy)
        left.axhline(here[0].rho_before, color=colour, linestyle=":", linewidth=1.5)
        right.plot([row.reward for row in here], [row.moved_mb / 1e3 for row in here], "o-", color=colour)
    left.axhline(PAPER_LIMIT, color=INK, linestyle="--", linewidth=1, label="paper: ring at most 1.05")
    left.plot([], [], ":", color=INK, linewidth=1.5, label="before balancing")
    for axis in (left, right):
        axis.set_xscale("symlog", base=2, linthresh=0.25)
        axis.set_xticks(REWARDS, [f"{reward:g}" for reward in REWARDS])
        axis.set(xlabel="reward R_b: blocks held where they are")
    imbalance_axis(left)
    left.set_title("More reward, less even")
    right.set(ylabel="GB moved per attention, all ranks", ylim=(0, None), title="More reward, fewer bytes")
    legend_below(figure, left, columns=5)
    return figure


TRADE_OFF = Result("fig12", "R_b against ρ_s and bytes moved, 8 GPUs", draw)


if __name__ == "__main__":
    TRADE_OFF.run(arguments(__doc__, layers=2), measure)
