"""The pictures of docs/how-it-works.md: one mask, and what plans make of it.

Work is counted in dense blocks and time in the slowest rank's blocks: nothing here is timed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from dbsp_cli.owners_picture import RANKS, owners_picture
from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.planning.planners import require_planner
from dbsp_core.sources import MaskRequest, SyntheticSource

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
WAITING = "#dddddd"
NAMES = {"contiguous": "split blindly (contiguous)", "dbsp": "db-SP"}


def example_mask() -> BlockMask:
    """Five uneven heads over 24 × 24 blocks."""
    source = SyntheticSource(density=0.35, spread=0.6, profile_correlation=0.9, seed=7, block_q=64, block_k=64)
    return source.mask(MaskRequest(0, 5, (6, 16, 16)))


def plan_of(mask: BlockMask, strategy: str, planner: str) -> Plan:
    layout = SequenceLayout.named(require_planner(planner).layout, mask.grid, Strategy.parse(strategy))
    return make_plan(mask, strategy, planner, layout=layout)


def masks_picture(mask: BlockMask) -> Figure:
    """The mask itself, head by head."""
    figure, axes = pyplot.subplots(1, mask.heads, figsize=(10, 2.5), layout="constrained")
    for head, axis in enumerate(axes):
        bits = mask.bits[head].numpy()
        axis.imshow(bits, cmap="Greys", vmin=0, vmax=1.3)
        axis.set(title=f"head {head}: {bits.sum()} dense blocks", xticks=[], yticks=[])
        axis.title.set_size(9)
    axes[0].set(xlabel="key blocks", ylabel="query blocks")
    return figure


def owners_of(mask: BlockMask, strategy: str) -> Figure:
    """Who computes each (head, query block) row, and how many dense blocks that makes for each rank."""
    plans = [(NAMES[planner], plan_of(mask, strategy, planner)) for planner in NAMES]
    figure: Figure = owners_picture(f"{strategy}, {mask.heads} heads", plans)
    return figure


def timeline_picture(mask: BlockMask, strategy: str) -> Figure:
    """A ring's steps: each ends when the slowest rank is through, and the others wait."""
    figure, axes = pyplot.subplots(2, 1, figsize=(10, 3.8), layout="constrained", sharex=True)
    for axis, planner in zip(axes, NAMES, strict=True):
        plan = plan_of(mask, strategy, planner)
        start = 0
        for work in plan.metrics.work:
            slowest = work.max()
            for rank, blocks in enumerate(work):
                axis.barh(rank, blocks, left=start, color=RANKS[rank], edgecolor="white")
                axis.barh(rank, slowest - blocks, left=start + blocks, color=WAITING, edgecolor="white", hatch="///")
            start += slowest
            axis.axvline(start, color="black", linewidth=0.8)
        axis.set(title=f"{NAMES[planner]}: ρ_s {plan.rho:.3f}", yticks=range(plan.strategy.world))
        axis.set_yticklabels([f"rank {rank}" for rank in range(plan.strategy.world)])
        axis.invert_yaxis()
    axes[1].set_xlabel("dense blocks of the slowest rank, ring step after ring step (hatched: waiting)")
    figure.suptitle(strategy)
    return figure


def call_picture() -> Figure:
    """One call, from the layout outside attention and back."""
    figure, axis = pyplot.subplots(figsize=(10, 2.1), layout="constrained")
    axis.set(xlim=(0, 100), ylim=(4, 27))
    axis.axis("off")
    steps = (
        (1, "q, k, v\nsharded", "each rank: its shard\nof the sequence"),
        (18, "mask\nand plan", "the same bits\non every rank"),
        (35, "dispatch\nto owners", "one uneven\nall-to-all"),
        (52, "ring step 0 … y−1", "kernel on slot (r + i) mod y\n∥ next slot in flight"),
        (72, "merge\nby LSE", "with the step's\nkernel"),
        (87, "combine", "the same\nbackwards"),
    )
    for index, (left, title, detail) in enumerate(steps):
        right = steps[index + 1][0] - 4 if index + 1 < len(steps) else 99
        box = FancyBboxPatch((left, 14), right - left, 11, boxstyle="round,pad=0.6", fc="#eef3f8", ec=RANKS[0])
        axis.add_patch(box)
        axis.text((left + right) / 2, 19.5, title, ha="center", va="center", size=10, weight="bold")
        axis.text((left + right) / 2, 10.5, detail, ha="center", va="top", size=8.5)
        if index + 1 < len(steps):
            arrow = FancyArrowPatch((right + 0.8, 19.5), (right + 3.2, 19.5), arrowstyle="-|>", mutation_scale=12)
            axis.add_patch(arrow)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the PNGs")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    mask = example_mask()
    pictures = {
        "masks": masks_picture(mask),
        "owners": owners_of(mask, "U2R2"),
        "timeline": timeline_picture(mask, "U1R4"),
        "call": call_picture(),
    }
    for name, figure in pictures.items():
        figure.savefig(out / f"{name}.png", dpi=110)
        pyplot.close(figure)
        print(f"wrote {out / name}.png")


if __name__ == "__main__":
    main()
