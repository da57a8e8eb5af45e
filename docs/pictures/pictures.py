"""The first picture of README.md, and those of docs/how-it-works.md: masks, and what plans make of them.

Work is counted in active blocks and time in the slowest rank's blocks: nothing here is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from matplotlib import rcParams
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.planners import require_planner
from dbsp_core.reports.style import INK, RANKS, SOFT, STYLE, WIDTH, heading
from dbsp_core.sources import MaskRequest, SyntheticSource
from scripts.reproduce.common import preset_blocks, preset_model
from scripts.results.colours import PLANNERS

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
NAMES = {"contiguous": "Plain sequence parallelism", "dbsp": "db-SP"}
MODEL, LAYER, STRATEGY = "wan2.1-t2v-14b", 6, "U8R1"
"""Layer of the first picture: less imbalanced than the mean of all forty, whose ρ_s is 1.318 (table1.csv)."""

rcParams.update(STYLE)


def example_mask() -> BlockMask:
    """Five heads with unequal work over 24 × 24 blocks."""
    source = SyntheticSource(density=0.35, spread=0.6, seed=7, block_q=64, block_k=64)
    return source.mask(MaskRequest(0, 5, (6, 16, 16)))


def model_mask() -> BlockMask:
    """One layer's of Wan2.1-14B at 720p, under the synthetic masks that are fitted to the paper's numbers."""
    source, model = SyntheticSource(preset=MODEL, **preset_blocks(MODEL)), preset_model(MODEL)
    return source.mask(MaskRequest(LAYER, model.heads, model.thw, model.text_tokens))


def plan_of(mask: BlockMask, strategy: str, planner: str) -> Plan:
    layout = SequenceLayout.named(require_planner(planner).layout, mask.grid, Strategy.parse(strategy))
    return make_plan(mask, strategy, planner, layout=layout)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share > 0.05 else f"{100 * share:.1f} %"


def figure_of(height: float, title: str, note: str = "") -> Figure:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    heading(figure, title, note)
    return figure


def waiting_picture(mask: BlockMask) -> Figure:
    """One attention on eight GPUs, before and after balancing."""
    plans = {planner: plan_of(mask, STRATEGY, planner) for planner in NAMES}
    ends = {planner: int(plan.work.max()) for planner, plan in plans.items()}
    earlier = 1 - ends["dbsp"] / ends["contiguous"]
    figure = figure_of(
        5.4,
        f"Balanced over the GPUs, the same attention ends {percent(earlier)} sooner",
        f"One block-sparse attention of Wan2.1-14B at 720p on {STRATEGY[1]} GPUs, density {mask.density:.2f} "
        "(synthetic)\nTime is counted in the plans' active blocks, not measured; exchanges are not in it",
    )
    axes = figure.subplots(2, 1, sharex=True)
    for axis, (planner, plan) in zip(axes, plans.items(), strict=True):
        work, end = plan.work, ends[planner]
        lanes = range(len(work))
        axis.barh(lanes, work, 0.8, color=PLANNERS[planner])
        axis.barh(lanes, end - work, 0.8, left=work, color="white", hatch="////", edgecolor="#a8a196", linewidth=0)
        axis.axvline(end, color=INK, linewidth=1.6)
        waiting = 1 - work.mean() / end
        axis.set_title(f"{NAMES[planner]}: {percent(waiting)} of the GPUs' time is waiting", loc="left")
        axis.set(yticks=lanes, xlim=(0, 1.02 * ends["contiguous"]), ylim=(len(work) - 0.4, -0.6), xticks=[])
        axis.set_yticklabels([f"GPU {rank}" for rank in lanes])
        axis.grid(visible=False)
        axis.tick_params(axis="y", length=0)
        axis.spines[["left", "bottom"]].set_visible(False)
    arrow = {"arrowstyle": "<|-|>", "color": INK, "linewidth": 1.4, "shrinkA": 0, "shrinkB": 0}
    middle = (len(work) - 1) / 2
    axes[1].annotate("", (ends["dbsp"], middle), (ends["contiguous"], middle), arrowprops=arrow)
    at = (ends["dbsp"] + ends["contiguous"]) / 2
    axes[1].text(at, middle - 0.45, f"{percent(earlier)} earlier", ha="center", size=13, weight="bold")
    axes[0].axvline(ends["contiguous"], color=INK, linewidth=1.6)
    axes[1].axvline(ends["contiguous"], color=INK, linewidth=1.0, linestyle=":")
    axes[1].set_xlabel("time →   (coloured: computing, hatched: waiting for the slowest)")
    return figure


def masks_picture(mask: BlockMask) -> Figure:
    """The mask itself, head by head."""
    figure = figure_of(
        2.9, "Heads keep different blocks, and different numbers of them", "Dark: an active block, computed"
    )
    axes = figure.subplots(1, mask.heads)
    for head, axis in enumerate(axes):
        bits = mask.bits[head].numpy()
        axis.imshow(bits, cmap="Greys", vmin=0, vmax=1.3)
        axis.set(title=f"head {head}: {bits.sum()}", xticks=[], yticks=[], xlabel="key blocks")
        axis.grid(visible=False)
        axis.spines[["top", "right"]].set_visible(True)
    axes[0].set_ylabel("query blocks")
    return figure


def owners_of(mask: BlockMask, strategy: str) -> Figure:
    """Who computes each (head, query block) row, and how many active blocks that makes for each rank."""
    plans = [(NAMES[planner], plan_of(mask, strategy, planner)) for planner in NAMES]
    world = plans[0][1].strategy.world
    figure = Figure(figsize=(WIDTH, 1.0 + 2.2 * len(plans)), layout="constrained")
    note = f"{strategy}, {mask.heads} heads; right: active blocks by GPU, dotted: the mean (counted)"
    heading(figure, "Who computes what: a plan gives every row an owner", note)
    axes = figure.subplots(len(plans), 2, squeeze=False, width_ratios=(2.2, 1), sharex="col")
    for (left, right), (name, plan) in zip(axes, plans, strict=True):
        # left: the owner of each row, heads × query blocks
        norm = BoundaryNorm(np.arange(world + 1) - 0.5, world)
        colour_map = ListedColormap(RANKS[:world])
        left.imshow(plan.owner, cmap=colour_map, norm=norm, aspect="auto", interpolation="nearest")
        left.grid(visible=False)
        left.set_yticks(np.arange(plan.heads + 1) - 0.5, minor=True)
        left.grid(which="minor", axis="y", color="white", linewidth=0.5)
        left.tick_params(which="minor", length=0)
        left.set_ylabel("head")
        left.set_title(f"{name}: owner of each row", loc="left")
        # right: active blocks of each rank
        right.barh(range(world), plan.work, height=0.8, color=RANKS[:world])
        right.axvline(plan.work.mean(), color=INK, linestyle="dotted")
        right.set_title(f"ρ_s {plan.rho:.3f}", loc="left")
        right.set(ylim=(world - 0.5, -0.5))
        right.grid(visible=False)
        right.set_yticks(range(world), [f"GPU {rank}" for rank in range(world)])
    axes[-1][0].set_xlabel("query block")
    axes[-1][1].set_xlabel("active blocks")
    return figure


def call_picture() -> Figure:
    """One call, from the layout outside attention and back."""
    figure = figure_of(2.8, "One call: every query goes to its owner, and its output comes back")
    axis = figure.subplots()
    axis.set(xlim=(0, 100), ylim=(1.5, 27))
    axis.axis("off")
    steps = (
        (1, "q, k, v\nsharded", "each rank: its shard\nof the sequence", "sharding/\nsequence_parallel.py"),
        (
            18,
            "mask\nand plan",
            "identical\non every rank",
            "runtime/session.py, slot.py\nplanning/planners.py",
        ),
        (35, "dispatch\nto owners", "one\nall-to-all", "comm/exchange.py"),
        (52, "chunk 0 … y−1", "kernel on one chunk of keys\n∥ the next in flight", "runtime/chunk_attention.py"),
        (72, "merge\nby LSE", "with the chunk's\nkernel", "dbsp_kernels"),
        (87, "combine", "the same\nbackwards", "comm/exchange.py"),
    )
    for index, (left, title, detail, files) in enumerate(steps):
        right = steps[index + 1][0] - 4 if index + 1 < len(steps) else 99
        box = FancyBboxPatch((left, 16), right - left, 9, boxstyle="round,pad=0.6", fc="#eef3f8", ec=PLANNERS["dbsp"])
        axis.add_patch(box)
        middle = (left + right) / 2
        axis.text(middle, 20.5, title, ha="center", va="center", size=10, weight="bold")
        axis.text(middle, 13.5, detail, ha="center", va="top", size=9)
        axis.text(middle, 6.5, files, ha="center", va="top", size=7.5, color=SOFT)
        if index + 1 < len(steps):
            arrow = FancyArrowPatch((right + 0.8, 20.5), (right + 3.2, 20.5), arrowstyle="-|>", mutation_scale=12)
            axis.add_patch(arrow)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the PNGs")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    mask = example_mask()
    pictures = {
        "waiting": waiting_picture(model_mask()),
        "masks": masks_picture(mask),
        "owners": owners_of(mask, "U2R2"),
        "call": call_picture(),
    }
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png")
        print(f"wrote {out / name}.png")


if __name__ == "__main__":
    main()
