"""docs/pictures/strategies.png: how Ulysses, Ring and UxRy cut one attention over four GPUs, and what is sent.

Everything is read off plans of the contiguous planner: which rank has which tokens, rows and keys, and bytes that are
counted as the latency model counts them, in units of one GPU's share of q.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.reports.style import RANKS, STYLE, WIDTH, heading

PICTURES = Path(__file__).resolve().parent
HEADS, BLOCKS, BLOCK = 4, 8, 64
CUTS = {
    "U4R1": "Ulysses: whole heads, every token",
    "U1R4": "Ring: every head, a quarter of the tokens",
    "U2R2": "Both: half of the heads, half of the tokens",
}
COLUMNS = ("outside attention: tokens", "in attention: queries", "in attention: k and v")

rcParams.update(STYLE)


def plan_of(strategy: str) -> tuple[Plan, SequenceLayout]:
    grid = BlockGrid.uniform(BLOCKS * BLOCK, BLOCK)
    mask = BlockMask(torch.ones(HEADS, grid.nq, grid.nk, dtype=torch.bool), grid)
    layout = SequenceLayout.named("contiguous", grid, Strategy.parse(strategy))
    return make_plan(mask, strategy, "contiguous", layout=layout), layout


def keys_of(plan: Plan, chunk: int) -> np.ndarray:
    """int64[H, nk]: the rank that computes with each head's key blocks in a chunk; -1: none."""
    found = np.full((plan.heads, plan.grid.nk), -1)
    for rank in range(plan.strategy.world):
        found[plan.chunks.blocks_for(rank)[chunk]] = rank
    return found


def transfers(plan: Plan, layout: SequenceLayout) -> str:
    """What a GPU receives, in words, as the mean over GPUs; a number is how many times its share of q."""
    traffic = traffic_of(plan, layout)
    share = plan.heads * plan.grid.tokens

    def received(sent: np.ndarray) -> float:
        return float(sent.sum() - sent.trace()) / share

    first, fetched = received(traffic.dispatch), sum(received(sent) for sent in 2 * traffic.keys[1:])
    exchange = f"all-to-all, q, k and v: {first:g}" if first else "nothing"
    further = plan.strategy.ring - 1
    chunks = f"k and v, {further} chunk{'s' if further > 1 else ''}: {fetched:g}" if fetched else "no further keys"
    back = f"all-to-all, outputs: {received(traffic.queries):g}" if first else "nothing"
    return f"before: {exchange}     during: {chunks}     after: {back}"


def strategies_picture() -> Figure:
    figure = Figure(figsize=(WIDTH, 8.6), layout="constrained")
    heading(
        figure,
        "How do Ulysses, Ring and both cut one attention?",
        f"Four GPUs, {HEADS} heads, {BLOCKS} blocks of tokens; a colour is a GPU, arrows: who needs the keys next\n"
        "Numbers: what a GPU receives, counted, in multiples of its share of q",
    )
    parts = figure.subfigures(len(CUTS), 1)
    for part, (strategy, words) in zip(parts, CUTS.items(), strict=True):
        plan, layout = plan_of(strategy)
        part.suptitle(f"{strategy}  {words}", x=0.012, ha="left", weight="bold", size=12.5)
        part.supxlabel(transfers(plan, layout), x=0.012, ha="left", size=10)
        axes = part.subplots(1, 3, sharey=True)
        shard = np.broadcast_to(layout.rank[::BLOCK], (HEADS, BLOCKS))
        for axis, name, ranks in zip(axes, COLUMNS, (shard, plan.owner, keys_of(plan, 0)), strict=True):
            _ranks(axis, ranks)
            later = ", chunk 0" if plan.strategy.ring > 1 and name == COLUMNS[-1] else ""
            axis.set_title(name + later, size=10, weight="normal")
        if plan.strategy.ring > 1:
            _arrows(axes[2], keys_of(plan, 0), keys_of(plan, 1))
        axes[0].set(ylabel="head", yticks=range(HEADS))
    return figure


def _ranks(axis: Axes, ranks: np.ndarray) -> None:
    world = 4
    norm = BoundaryNorm(np.arange(world + 1) - 0.5, world)
    axis.imshow(ranks, cmap=ListedColormap(RANKS[:world]), norm=norm, aspect="auto", interpolation="nearest")
    axis.set_xticks(np.arange(BLOCKS + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(HEADS + 1) - 0.5, minor=True)
    axis.grid(visible=False)
    axis.grid(which="minor", color="white", linewidth=2.5)
    axis.tick_params(which="both", length=0)
    axis.set(xticks=[0, BLOCKS - 1], xlabel="")
    axis.set_xticklabels(["first tokens", "last"], size=9)
    axis.spines[:].set_visible(False)
    for rank in np.unique(ranks):
        heads, blocks = np.nonzero(ranks == rank)
        ground = {"facecolor": RANKS[rank], "edgecolor": "none", "pad": 2}
        look = {"ha": "center", "va": "center", "color": "white", "weight": "bold", "bbox": ground}
        axis.text(blocks.mean(), heads.mean(), f"GPU {rank}", **look)


def _arrows(axis: Axes, now: np.ndarray, later: np.ndarray) -> None:
    """From each GPU's keys to the GPU that computes with them in the next ring step."""
    look = {"arrowstyle": "-|>", "color": "white", "linewidth": 1.6, "connectionstyle": "arc3,rad=-0.17"}
    for rank in np.unique(now):
        heads, blocks = np.nonzero(now == rank)
        receiver = later[heads[0], blocks[0]]
        to_heads, to_blocks = np.nonzero(now == receiver)
        start = blocks.mean(), heads.mean() - 0.5
        axis.annotate("", (to_blocks.mean(), to_heads.mean() - 0.5), start, arrowprops=look)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PICTURES, help="folder for the PNG")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    strategies_picture().savefig(out / "strategies.png")
    print(f"wrote {out / 'strategies.png'}")


if __name__ == "__main__":
    main()
