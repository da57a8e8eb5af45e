#!/usr/bin/env python3
"""Fig. 9: modelled attention speed-up against ρ_s of the contiguous plan, for Ulysses (heads) and Ring (blocks).

Masks differ in how uneven heads are (Ulysses) or rows and columns (Ring); all else is the preset's. The paper shows a
growth close to linear, without numbers: the line drawn is speed-up = ρ_s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from common import publish
from dbsp_cli.simulate import RunConfig
from dbsp_core import Strategy
from dbsp_core.models.table import MODEL_SPECS
from modelled import MODELLED, machine, model_masks, modelled_arguments, video

MODEL = "wan2.1-t2v-14b"
LEVELS = {
    "U8R1": ("head_concentration", (40.0, 12.0, 6.0, 3.0, 1.5)),
    "U1R8": ("spread", (0.1, 0.25, 0.4, 0.6, 0.9)),
}
PLANNERS = ("paper", "dbsp")


@dataclass(frozen=True)
class Row:
    """reached: attention_speedup over (rho_before / rho)"""

    strategy: str
    planner: str
    varied: str
    rho_before: float
    rho: float
    attention_speedup: float
    reached: float
    paper: str
    label: str


def measure(options) -> list[Row]:
    model, hardware, rows = MODEL_SPECS[MODEL], machine(options), []
    for name, (key, values) in LEVELS.items():
        strategy = Strategy.parse(name)
        for value in values:
            masks = model_masks(MODEL, options, **{key: value})
            base = video(RunConfig(strategy, "contiguous"), masks, model, hardware)
            for planner in PLANNERS:
                one = video(RunConfig(strategy, planner), masks, model, hardware)
                speedup = base.attention_s / one.attention_s
                rows.append(
                    Row(
                        name,
                        planner,
                        f"{key}={value:g}",
                        base.rho,
                        one.rho,
                        speedup,
                        speedup * one.rho / base.rho,
                        "close to linear (§6.3)",
                        f"{MODELLED}, {hardware.name}",
                    )
                )
    return rows


def draw(rows: list[Row]) -> Figure:
    figure, axes = pyplot.subplots(figsize=(6.5, 4.5), layout="constrained")
    for name, (key, _) in LEVELS.items():
        for planner, marker in zip(PLANNERS, ("s--", "o-"), strict=True):
            here = sorted(
                (row for row in rows if (row.strategy, row.planner) == (name, planner)), key=lambda row: row.rho_before
            )
            kind = "heads" if name == "U8R1" else "blocks"
            axes.plot(
                [row.rho_before for row in here],
                [row.attention_speedup for row in here],
                marker,
                color="C0" if kind == "heads" else "C1",
                label=f"{name} ({kind}, varying {key}), planner {planner}",
            )
    most = max(row.rho_before for row in rows)
    line = np.array([1, most])
    axes.plot(line, line, "k:", label="speed-up = ρ_s (paper: close to linear)")
    axes.set(xlabel="ρ_s of the contiguous plan", ylabel="attention speed-up")
    axes.legend(fontsize=8)
    axes.set_title(f"{MODEL}, 8 GPUs: {rows[0].label}", fontsize=10)
    return figure


def main() -> None:
    options = modelled_arguments(__doc__, layers=1).parse_args()
    rows = measure(options)
    publish("fig9", "Attention speed-up against ρ_s, 8 GPUs", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
