"""What balance is worth with few denoising steps, and how well plans serve that were made for other masks.

Videos of the small trained model, one after another, under masks that SpargeAttn's predictor finds at every attention,
without guidance, as distilled models run. ρ_s is counted from these masks: unbalanced (contiguous), under a plan made
for the mask itself, under the latest (the last step's; at a video's first step, that of the last video's last step),
and under that of the same step of the last video, with another caption and seed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.style import PLANNERS
from scripts.results.figures import grouped_bars, imbalance_axis, legend_below, panels
from scripts.results.result import FOLDER, Result
from scripts.training.trained_model.demo import PREDICTED
from scripts.training.trained_model.small_model import PROMPTS, generate, load_pipeline

STRATEGIES = ("U4R1", "U2R2", "U1R4")
STEPS = (4, 8)

Masks = dict[tuple[int, int], BlockMask]


@dataclass(frozen=True)
class FewSteps:
    """Mean ρ_s over layers, steps and videos, from the second video on; and the largest under kept plans."""

    steps: int
    strategy: str
    unbalanced: float
    own_plan: float
    latest: float
    latest_max: float
    last_video: float
    last_video_max: float
    label: str = "counted on masks of the small trained model"


def masks_of_videos(steps: int, videos: int) -> list[Masks]:
    """Of each video, its masks by step and layer."""
    pipeline, found = load_pipeline(), []
    for seed, prompt in enumerate(PROMPTS[:videos]):
        _, watched = generate(pipeline, prompt, seed, steps, PREDICTED, keep=True, guidance=1.0)
        found.append({(at.step, at.layer): mask for at, mask in watched.masks.items()})
    return found


def measure(videos: list[Masks], steps: int, strategy: str) -> FewSteps:
    grid = next(iter(videos[0].values())).grid
    layout = SequenceLayout.named("striped", grid, Strategy.parse(strategy))
    plans = [{at: make_plan(mask, strategy, layout=layout) for at, mask in masks.items()} for masks in videos]
    own: list[Plan] = []
    by_latest: list[float] = []
    by_video: list[float] = []
    for before, now, masks in zip(plans, plans[1:], videos[1:], strict=False):
        for (step, layer), mask in masks.items():
            own.append(now[step, layer])
            by_video.append(before[step, layer].evaluate(mask).rho)
            latest = now[step - 1, layer] if step else before[steps - 1, layer]
            by_latest.append(latest.evaluate(mask).rho)
    return FewSteps(
        steps,
        strategy,
        float(np.mean([plan.rho_before for plan in own])),
        float(np.mean([plan.rho for plan in own])),
        float(np.mean(by_latest)),
        max(by_latest),
        float(np.mean(by_video)),
        max(by_video),
    )


PLANS = {
    "unbalanced": ("none: plain sequence parallelism", PLANNERS["contiguous"]),
    "latest": ("of the step before", "#c4d8ec"),
    "last_video": ("of the same step of the last video", "#86b0da"),
    "own_plan": ("made for the mask itself", PLANNERS["dbsp"]),
}
"""What a mask's plan was made for, in words, and its colour."""


def draw(rows: list[FewSteps]) -> Figure:
    figure, axes = panels(
        "With few denoising steps, does a plan serve that was made for another mask?",
        f"Mean imbalance on 4 GPUs over layers, steps and videos; –: the worst; {rows[0].label}",
        height=4.6,
    )
    (axis,) = axes[0]
    series = {words: [getattr(row, name) for row in rows] for name, (words, _) in PLANS.items()}
    nan = [float("nan")] * len(rows)
    worst = {words: [getattr(row, f"{name}_max", nan[0]) for row in rows] for name, (words, _) in PLANS.items()}
    groups = [f"{row.strategy}\n{row.steps} steps" for row in rows]
    grouped_bars(axis, groups, series, [colour for _, colour in PLANS.values()], base=1.0, worst=worst)
    imbalance_axis(axis)
    legend_below(figure, axis, columns=2, title="the plan in use")
    return figure


FEW_STEPS = Result("few-steps", "Few denoising steps", FewSteps, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=3, help="at least 2")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args()
    rows = []
    for steps in STEPS:
        videos = masks_of_videos(steps, options.videos)
        rows += [measure(videos, steps, strategy) for strategy in STRATEGIES]
    FEW_STEPS.publish(rows, options.out)


if __name__ == "__main__":
    main()
