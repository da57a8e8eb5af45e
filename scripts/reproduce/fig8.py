"""Fig. 8: modelled end-to-end and attention time on 8 and 4 GPUs, contiguous plans against the paper's and ours."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_cli.simulate import RunConfig
from scripts.reproduce.common import publish
from scripts.reproduce.modelled import (
    MODELLED,
    PAPER_ATTENTION,
    PAPER_END_TO_END,
    machine,
    modelled_arguments,
    models_of,
    strategies,
    video,
)

PLANNERS = ("contiguous", "paper", "dbsp")


@dataclass(frozen=True)
class Row:
    """speedup, attention_speedup: of this planner's best strategy over contiguous plans on this row's strategy.

    paper:           §6.2's range of mean end-to-end speed-ups over all baselines, of this model and number of GPUs
    paper_attention: §6.2's mean attention speed-up over this baseline, over both models
    """

    model: str
    gpus: int
    strategy: str
    planner: str
    rho: float
    attention_s: float
    end_to_end_s: float
    attention_speedup: float
    speedup: float
    paper_attention: str
    paper: str
    label: str


def measure(options) -> list[Row]:
    hardware, rows = machine(options), []
    for model, masks in models_of(options.models, options):
        for gpus in (8, 4):
            found = {
                (str(strategy), planner): video(RunConfig(strategy, planner), masks, model, hardware)
                for strategy, planner in itertools.product(strategies(gpus), PLANNERS)
            }
            least, most = PAPER_END_TO_END[model.name, gpus]
            for (strategy, planner), one in found.items():
                base = found[strategy, "contiguous"]
                own = [other for (_, name), other in found.items() if name == planner]
                best = base if planner == "contiguous" else min(own, key=lambda other: other.end_to_end_s)
                paper = PAPER_ATTENTION.get((strategy, gpus))
                rows.append(
                    Row(
                        model.name,
                        gpus,
                        strategy,
                        planner,
                        one.rho,
                        one.attention_s,
                        one.end_to_end_s,
                        base.attention_s / best.attention_s,
                        base.end_to_end_s / best.end_to_end_s,
                        f"{paper}" if paper else "–",
                        f"{least}–{most}",
                        f"{MODELLED}, {hardware.name}",
                    )
                )
    return rows


def draw(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys((row.model, row.gpus) for row in rows))
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(4.2 * len(panels), 4.2), squeeze=False, layout="constrained"
    )
    for panel, (model, gpus) in zip(axes[0], panels, strict=True):
        here = [row for row in rows if (row.model, row.gpus) == (model, gpus)]
        names = list(dict.fromkeys(row.strategy for row in here))
        for number, planner in enumerate(PLANNERS):
            own = [row for row in here if row.planner == planner]
            place = np.arange(len(names)) + (number - 1) * 0.27
            bars = panel.bar(place, [row.attention_s for row in own], 0.25, label=f"{planner}: attention")
            other = [row.end_to_end_s - row.attention_s for row in own]
            panel.bar(
                place, other, 0.25, bottom=[row.attention_s for row in own], color=bars[0].get_facecolor(), alpha=0.4
            )
        panel.set_xticks(range(len(names)), names)
        best = [row.speedup for row in here if row.planner == "dbsp"]
        panel.set_title(
            f"{model}, {gpus} GPUs\ndbsp {min(best):.2f}–{max(best):.2f}×, paper {here[0].paper}×", fontsize=9
        )
    axes[0][0].set_ylabel("seconds per video (pale: everything else)")
    figure.legend(*axes[0][-1].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(f"End-to-end time: {rows[0].label}")
    return figure


def main() -> None:
    parser = modelled_arguments(__doc__, layers=2)
    choices = ["wan2.1-t2v-14b", "cogvideox1.5-5b"]
    parser.add_argument("--models", nargs="+", choices=choices, default=choices)
    options = parser.parse_args()
    rows = measure(options)
    publish("fig8", "End-to-end and attention time", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
