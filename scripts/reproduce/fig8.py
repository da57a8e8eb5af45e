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
from matplotlib.figure import Figure
from rich.console import Console

from dbsp_core.cost.machine import load_hardware
from dbsp_core.reports.style import SOFT
from scripts.reproduce.authors.fit import MACHINES, UNKNOWNS
from scripts.reproduce.authors.measured import BURST, DBSP, Bar, bars, fitted_half
from scripts.reproduce.authors.runs import bar_attention_s, other_s
from scripts.reproduce.common import arguments
from scripts.results.colours import ROLES
from scripts.results.figures import in_words, legend_below, panels
from scripts.results.result import Result

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
    figure, axes = panels(
        "Does the latency model find the authors' times?",
        "Seconds per video on 8 GPUs: attention in full colour, everything else pale",
        4,
        height=11.0,
    )
    cases = dict.fromkeys((row.model, row.machine) for row in rows)
    for axis, (model, machine) in zip(axes.flat, cases, strict=True):
        here = [row for row in rows if (row.model, row.machine) == (model, machine)]
        place, ticks, methods = 0.0, [], {}
        for row, after in itertools.zip_longest(here, here[1:]):
            for shift, total, attention, role in (
                (-0.2, row.measured_s, row.measured_attention_s, "measured"),
                (0.2, row.modelled_s, row.modelled_attention_s, row.half),
            ):
                axis.bar(place + shift, total - attention, 0.38, color=ROLES[role], alpha=0.35)
                axis.bar(place + shift, attention, 0.38, bottom=total - attention, color=ROLES[role])
            ticks.append((place, row.way.replace("Engine", "")))
            methods.setdefault(row.method, []).append(place)
            place += 1 if after is None or after.method == row.method else 1.8
        axis.set_xticks(*zip(*ticks, strict=True), fontsize=9)
        top = max(max(row.measured_s, row.modelled_s) for row in here)
        for method, places in methods.items():
            axis.text(np.mean(places), 1.04 * top, method, ha="center", size=10, color=SOFT)
        worst = max(abs(row.error) for row in here if row.half == "held out")
        axis.set_title(f"{in_words(model)} on 8 {machine.upper()}: held-out bars within {worst:.0%}")
        axis.set(ylabel="seconds", ylim=(0, 1.18 * top))
        axis.grid(axis="x", visible=False)
    for role, label in zip(
        ROLES, ("measured by the authors", "modelled, fitted to", "modelled, held out"), strict=True
    ):
        axes[0, 0].bar(0, 0, color=ROLES[role], label=label)
    legend_below(figure, axes[0, 0])
    return figure


BARS = Result("fig8", "End-to-end and attention time on 8 GPUs", Row, draw)


def main() -> None:
    options = arguments(__doc__ or "", 0).parse_args()
    rows = measure()
    BARS.publish(rows, options.out)
    for line in summary(rows):
        Console(width=120).print(line)


if __name__ == "__main__":
    main()
