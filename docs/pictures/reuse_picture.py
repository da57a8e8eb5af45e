"""docs/pictures/reuse.png: a plan kept over denoising steps, and made again where the mask has drifted too far.

The masks are those of `scripts.reproduce.fig11`, one layer's: Wan2.1 under SpargeAttn on eight Ulysses ranks,
synthetic, with a drift that is fitted to the paper's one point.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

from dbsp_core import BlockMask, make_plan
from dbsp_core.planning.reuse import replay
from dbsp_core.reports.style import INK, SOFT, STYLE, WIDTH, heading
from scripts.reproduce.common import arguments
from scripts.reproduce.fig11 import STRATEGY, masks_by_step, plans_on
from scripts.results.colours import PLANNERS

PICTURES = Path(__file__).resolve().parent
THRESHOLD = 1.10

rcParams.update(STYLE)


def kept(masks: list[BlockMask], threshold: float) -> tuple[list[float], list[int]]:
    """ρ_s of each step's mask under the plan in use, and the steps at which a plan was made."""
    make = plans_on(masks[0].grid, "dbsp")
    uses = replay([mask.counts.rows for mask in masks], threshold, make, lag=False)
    rho = [use.counted.rho for use in uses if use.counted is not None]
    return rho, [step for step, use in enumerate(uses) if use.new]


def reuse_picture(masks: list[BlockMask]) -> Figure:
    rho, made = kept(masks, THRESHOLD)
    once, _ = kept(masks, float("inf"))
    blind = make_plan(masks[0], STRATEGY, "contiguous")
    unbalanced = [blind.counted(mask, compare=False).rho for mask in masks]
    steps = range(len(masks))
    figure = Figure(figsize=(WIDTH, 4.6), layout="constrained")
    heading(
        figure,
        f"{len(made)} plans cover {len(masks)} denoising steps",
        "A plan is kept while ρ_s of the step's mask under it stays below the threshold, else it is made again\n"
        f"One layer, {STRATEGY}; counted on drifting synthetic masks (Wan2.1-14B under SpargeAttn)",
    )
    axis = figure.subplots()
    axis.plot(steps, unbalanced, color=PLANNERS["contiguous"], label="no plan: plain sequence parallelism")
    axis.plot(steps, once, color="#86b0da", linestyle="--", label="one plan, kept for good")
    axis.plot(steps, rho, color=PLANNERS["dbsp"], linewidth=2.6, label="kept below the threshold")
    axis.plot(made, [rho[step] for step in made], "o", color=INK, markersize=8, label="a plan is made")
    axis.axhline(THRESHOLD, color=SOFT, linestyle=":", linewidth=1.4)
    axis.text(len(masks) - 1, THRESHOLD + 0.004, f"threshold {THRESHOLD:.2f}", ha="right", va="bottom", color=SOFT)
    axis.set(xlabel="denoising step", ylabel="imbalance ρ_s (1: even)", ylim=(1, None), xlim=(-1, len(masks)))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], layers=1)
    parser.set_defaults(out=PICTURES)
    options: argparse.Namespace = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reuse_picture(masks_by_step(0, options)).savefig(options.out / "reuse.png")
    print(f"wrote {options.out / 'reuse.png'}")


if __name__ == "__main__":
    main()
