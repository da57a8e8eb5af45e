"""Fig. 8 on 8 GPUs: the authors' bars beside the latency model's, fitted to half of them; and what ρ_s alone explains.

Constants are those of the hardware files with their 8-bit kernels, ρ_s are Table 1's; `scripts.reproduce.authors` says
where the numbers come from. Two definitions of speed-up: over U8R1 of the same method (the paper's text), and over the
mean of the four contiguous strategies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.console import Console

from dbsp_core.cost.hardware import load_hardware
from scripts.reproduce.authors.fit import MACHINES, UNKNOWNS
from scripts.reproduce.authors.measured import BURST, DBSP, PARO, Bar, bars, fitted_half
from scripts.reproduce.authors.runs import bar_attention_s, other_s
from scripts.reproduce.common import arguments, publish

LABEL = "measured by the paper's authors (read off a picture, ±1 s); modelled"
WORTH = 0.03
"""Relative difference above which the order of two measured bars counts."""


@dataclass(frozen=True)
class Row:
    """error: modelled over measured time of the video, less one
    rho_alone_s: modelled without the unexplained gain of PAROAttention's blocks under db-SP
    speedup, attention_speedup: measured, U8R1's time over this one; modelled_…: the model's
    """

    model: str
    machine: str
    method: str
    way: str
    measured_s: float
    modelled_s: float
    error: float
    half: str
    measured_attention_s: float
    modelled_attention_s: float
    rho_alone_s: float
    speedup: float
    modelled_speedup: float
    attention_speedup: float
    modelled_attention_speedup: float
    label: str = LABEL


def measure() -> list[Row]:
    known = {name: load_hardware(name).with_kernel("sparge").constants for name in MACHINES}
    by_rho = replace(UNKNOWNS, reordered_cost=1.0)
    everything, rows = bars(), []
    others = {
        key: float(np.median([bar.other_s for bar in group if bar.other_s is not None]))
        for key, group in itertools.groupby(everything, lambda bar: (bar.model, bar.machine))
    }
    times: dict[Bar, tuple[float, ...]] = {}
    for bar in everything:
        own = known[bar.machine]
        attention, alone = (bar_attention_s(bar, own, unknowns) for unknowns in (UNKNOWNS, by_rho))
        rest = other_s(bar.model, own)
        read = bar.end_to_end_s - (bar.other_s or others[bar.model, bar.machine])
        times[bar] = (bar.end_to_end_s, rest + attention, read, attention, rest + alone)
    for bar, fitted in zip(everything, fitted_half(len(everything)), strict=True):
        base = times[next(other for other in everything if other.panel == bar.panel and other.way == "U8R1")]
        measured, modelled, read, attention, alone = times[bar]
        rows.append(
            Row(
                *(*bar.panel, bar.way),
                measured,
                modelled,
                modelled / measured - 1,
                "fitted" if fitted else "held out",
                read,
                attention,
                alone,
                base[0] / measured,
                base[1] / modelled,
                base[2] / read,
                base[3] / attention,
            )
        )
    return rows


def summary(rows: Sequence[Row]) -> list[str]:
    """Errors, orders and means in words."""
    lines = []
    for half in ("fitted", "held out"):
        errors = np.abs([row.error for row in rows if row.half == half])
        lines.append(f"{half}: {len(errors)} bars, median error {np.median(errors):.1%}, worst {errors.max():.1%}")
    wrong, pairs = [], 0
    for one, other in itertools.combinations(rows, 2):
        apart = abs(one.measured_s - other.measured_s) > WORTH * min(one.measured_s, other.measured_s)
        if (one.model, one.machine, one.method) == (other.model, other.machine, other.method) and apart:
            pairs += 1
            if (one.measured_s < other.measured_s) != (one.modelled_s < other.modelled_s):
                wrong.append(f"{one.model}, {one.machine}, {one.method}: {one.way} and {other.way}")
    lines.append(
        f"order of two bars over {WORTH:.0%} apart: {pairs - len(wrong)} of {pairs} right; wrong: {'; '.join(wrong)}"
    )
    for what, of in (("end to end", _end_to_end), ("attention", _attention)):
        theirs, ours, alone = (_mean_gain(rows, of(kind)) for kind in ("measured", "modelled", "rho_alone"))
        lines.append(
            f"{what}, db-SP, mean over all bars of contiguous plans: measured {theirs:.2f}, modelled {ours:.2f}, "
            f"by ρ_s alone {alone:.2f}"
        )
    return lines


def _end_to_end(kind: str) -> Callable[[Row], float]:
    return lambda row: getattr(row, f"{kind}_s")


def _attention(kind: str) -> Callable[[Row], float]:
    if kind == "rho_alone":
        return lambda row: row.modelled_attention_s + row.rho_alone_s - row.modelled_s
    return lambda row: getattr(row, f"{kind}_attention_s")


def _mean_gain(rows: Sequence[Row], time: Callable[[Row], float]) -> float:
    own = {(row.model, row.machine, row.method): time(row) for row in rows if row.way == DBSP}
    gains = [time(row) / own[row.model, row.machine, row.method] for row in rows if row.way not in (DBSP, BURST)]
    return float(np.mean(gains))


def draw(rows: list[Row]) -> Figure:
    panels = list(dict.fromkeys((row.model, row.machine) for row in rows))
    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5), layout="constrained")
    for panel, (model, machine) in zip(axes.flat, panels, strict=True):
        here = [row for row in rows if (row.model, row.machine) == (model, machine)]
        place, ticks = 0.0, []
        for row, after in itertools.zip_longest(here, here[1:]):
            for shift, total, attention, color in (
                (-0.2, row.measured_s, row.measured_attention_s, "C7"),
                (0.2, row.modelled_s, row.modelled_attention_s, "C0" if row.half == "fitted" else "C1"),
            ):
                panel.bar(place + shift, total - attention, 0.38, color=color, alpha=0.45)
                panel.bar(place + shift, attention, 0.38, bottom=total - attention, color=color)
            ticks.append((place, row.way.replace("Engine", "")))
            place += 1 if after is None or after.method == row.method else 2
        panel.set_xticks(*zip(*ticks, strict=True), rotation=90, fontsize=8)
        methods = ", ".join(dict.fromkeys(row.method.replace(PARO, "PARO") for row in here))
        worst = max(abs(row.error) for row in here if row.half == "held out")
        panel.set_title(f"{model}, {machine}: {methods}; held out within {worst:.0%}", fontsize=9)
        panel.set_ylabel("seconds per video")
    labels = {"C7": "measured by the authors", "C0": "modelled, fitted to", "C1": "modelled, held out"}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in labels]
    figure.legend(handles, labels.values(), ncols=3, fontsize=9, loc="outside lower center")
    figure.suptitle("Fig. 8 on 8 GPUs: attention (full colour) and everything else (pale)")
    return figure


def main() -> None:
    options = arguments(__doc__ or "", 0).parse_args()
    rows = measure()
    publish("fig8", "End-to-end and attention time on 8 GPUs", rows, draw(rows), options.out)
    for line in summary(rows):
        Console(width=120).print(line)


if __name__ == "__main__":
    main()
