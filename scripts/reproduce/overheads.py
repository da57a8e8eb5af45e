"""§6.4: what planning and moved tokens cost end to end, for the paper's planner as published and for ours.

The paper states limits, less than 1 % for heads and at most 5 % for blocks, of a run whose exchanges may hide. Here
nothing hides: all milliseconds of planning and the whole exchange of what changes ring rank are added up.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np

from dbsp_cli.commands.plan import passes
from dbsp_core import BlockMask, Plan, Strategy
from dbsp_core.planning.plan import plan_from_counts, usual_layout
from dbsp_core.planning.planner_config import PlannerLike, read_planner
from scripts.reproduce.common import FIG_11, STRATEGIES, masks, preset_model
from scripts.reproduce.fig11 import REUSE
from scripts.reproduce.lockstep import RingPlan, plan_ring
from scripts.reproduce.modelled import ELEMENT_BYTES, machine, modelled_arguments, modelled_video
from scripts.results.result import FOLDER, Result, Row

PRESET = "wan2.1-t2v-14b"
REWARD = 2.0  # R_b of the authors' scripts
PLANNERS: tuple[PlannerLike, ...] = ({"name": "paper", "reward": REWARD}, "dbsp")
LIMITS = {True: "< 1 % (§6.4)", False: "≤ 5 % (§6.4)"}


def planning_ms(mask: BlockMask, strategy: Strategy, planner: PlannerLike) -> float:
    """Returns the processor time of one plan, the shortest of five."""
    layout, times = usual_layout(planner, mask.grid, strategy), []
    for _ in range(5):
        start = time.thread_time()
        plan_from_counts(mask.counts.rows, mask.grid, strategy, planner, layout=layout, compare=False)
        times.append((time.thread_time() - start) * 1e3)
    return min(times)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """plans: in 50 steps at P_s 1.10; plan_ms: of one; planning, moving: shares of the video's time.

    moved_mb: of all ranks' Q, K, V and outputs in one attention, in 10⁶ bytes; outputs move as Q, K and V on average.
    """
    model, hardware, layers = preset_model(PRESET), machine(options), list(masks(PRESET, options))
    calls, element = passes(model) * model.layers, ELEMENT_BYTES[hardware.dtype]
    replans = {row.planner: row.replans for row in REUSE.read(FOLDER) if row.threshold == FIG_11["threshold"]}
    for name in STRATEGIES:
        strategy = Strategy.parse(name)
        for planner in PLANNERS:
            of = read_planner(planner)
            video = modelled_video(strategy, of.name, layers, model, hardware)
            seconds = video.attention_s + video.other_s
            # 1. Planning: as often as §4.2.1 says, for each layer and CFG pass.
            plan_ms = float(np.mean([planning_ms(mask, strategy, planner) for mask in layers]))
            made = replans[of.name] / FIG_11["steps"] * calls
            # 2. Moving: the share that changes ring rank, at the rate of an all-to-all.
            layout = usual_layout(planner, layers[0].grid, strategy)
            plans: list[Plan | RingPlan] = [
                plan_from_counts(mask.counts.rows, mask.grid, strategy, layout=layout, compare=False)
                if of.name == "dbsp"
                else plan_ring(mask, strategy, of.name, layout, REWARD)
                for mask in layers
            ]
            elements = 4 * model.heads * layers[0].grid.tokens * model.head_dim
            # Of ours rows alone move, Q and outputs: keys come from where they live.
            tensors = 2 if of.name == "dbsp" else 4
            moved = float(np.mean([plan.moved for plan in plans])) * tensors / 4 * elements * element
            moving_s = moved / strategy.world / hardware.constants.exchange_bytes_per_s
            yield Row(
                strategy=name,
                planner=of.name,
                plans=replans[of.name],
                plan_ms=plan_ms,
                planning=made * plan_ms / 1e3 / seconds,
                moved_mb=moved / 1e6,
                moving=moving_s * calls / seconds,
                paper=LIMITS[strategy.ring == 1],
                label=f"plans and bytes counted; ms measured on a shared core; seconds modelled ({hardware.name})",
            )


if __name__ == "__main__":
    parser = modelled_arguments(__doc__, layers=4)
    parser.set_defaults(coarsen=1)
    Result("overheads", "Planning and moving, 8 GPUs").run(parser, measure)
