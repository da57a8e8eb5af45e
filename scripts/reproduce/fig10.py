#!/usr/bin/env python3
"""Fig. 10: each static strategy against choosing one per attention, modelled, with balanced plans on 8 GPUs.

Densities differ between layers as those of `DENSITIES`, an assumption: the paper does not print its own. "dynamic"
takes the strategy of least predicted time for each layer, with no cost of switching (groups are built beforehand).
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib import pyplot
from matplotlib.figure import Figure

from common import publish
from dbsp_cli.simulate import LayerTime, RunConfig, summarize
from dbsp_core.models.table import MODEL_SPECS
from modelled import MODELLED, PAPER_DYNAMIC, machine, model_masks, modelled_arguments, strategies, times_of

MODELS = ("wan2.1-t2v-14b", "cogvideox1.5-5b")
DENSITIES = (0.05, 0.2, 0.414, 0.683)
PLANNERS = ("paper", "dbsp")


@dataclass(frozen=True)
class Row:
    """chosen: share of layers for which "dynamic" takes this strategy; dynamic_speedup: end to end, over this one"""

    model: str
    planner: str
    strategy: str
    attention_s: float
    end_to_end_s: float
    chosen: float
    dynamic_speedup: float
    paper: str
    label: str


def measure(options) -> list[Row]:
    hardware, rows = machine(options), []
    for name in options.models:
        model = MODEL_SPECS[name]
        masks = [mask for density in DENSITIES for mask in model_masks(name, options, density=density)]
        for planner in PLANNERS:
            ways = [RunConfig(strategy, planner) for strategy in strategies(8)]
            times = {way: times_of(way, masks, model, hardware) for way in ways}
            picks = [min(ways, key=lambda way, i=i: times[way][i].prediction.total_s) for i in range(len(masks))]
            best: list[LayerTime] = [times[way][i] for i, way in enumerate(picks)]
            dynamic = summarize(ways[0], best, model, hardware)
            for way in ways:
                one = summarize(way, times[way], model, hardware)
                rows.append(
                    Row(
                        name,
                        planner,
                        str(way.strategy),
                        one.attention_s,
                        one.end_to_end_s,
                        picks.count(way) / len(picks),
                        one.end_to_end_s / dynamic.end_to_end_s,
                        f"{PAPER_DYNAMIC[0]}–{PAPER_DYNAMIC[1]} (§6.3)",
                        f"{MODELLED}, {hardware.name}",
                    )
                )
    return rows


def draw(rows: list[Row]) -> Figure:
    names = list(dict.fromkeys(row.model for row in rows))
    figure, panels = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4), squeeze=False, layout="constrained")
    for axes, name in zip(panels[0], names, strict=True):
        for number, planner in enumerate(PLANNERS):
            here = [row for row in rows if (row.model, row.planner) == (name, planner)]
            place = [i + (number - 0.5) * 0.4 for i in range(len(here))]
            axes.bar(place, [row.dynamic_speedup for row in here], 0.38, label=f"planner {planner}")
            for x, row in zip(place, here, strict=True):
                axes.annotate(f"{row.chosen:.0%}", (x, row.dynamic_speedup), ha="center", va="bottom", fontsize=8)
        axes.axhspan(*PAPER_DYNAMIC, color="r", alpha=0.1, zorder=0, label="paper, over all static ones (§6.3)")
        axes.set_xticks(range(len(here)), [row.strategy for row in here])
        axes.set(ylim=(0.95, None), title=name)
    panels[0][0].set_ylabel("end-to-end speed-up of choosing per layer\n(percent: how often it takes this one)")
    figure.legend(*panels[0][-1].get_legend_handles_labels(), fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(f"Static strategies against dynamic, 8 GPUs: {rows[0].label}")
    return figure


def main() -> None:
    parser = modelled_arguments(__doc__, layers=1)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    rows = measure(options)
    publish("fig10", "Static strategies against dynamic, 8 GPUs", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
