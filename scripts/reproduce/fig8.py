"""Fig. 8: the authors' bars and the latency model's, which is fitted to those of 8 GPUs; those of 4 are held out.

Constants are those of the hardware files with their 8-bit kernels, ρ_s are Table 1's; `scripts.reproduce.authors` says
where the numbers come from. Speed-ups are over Ulysses with the same method and number of GPUs, as in the paper.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsp_core.cost.machine import load_hardware
from dbsp_core.reports.style import SOFT
from scripts.reproduce.authors.fit import MACHINES, errors_in_words
from scripts.reproduce.authors.measured import BURST, DBSP, Bar, bars
from scripts.reproduce.authors.runs import UNKNOWNS, bar_attention_s, other_s
from scripts.results.colours import ROLES
from scripts.results.figures import in_words, legend_below, panels
from scripts.results.result import Result, Row, arguments

LABEL = "measured by the paper's authors (read off a picture, ±1 s); modelled"
WORTH = 0.03  # relative difference above which the order of two measured bars counts


def measure() -> list[Row]:
    known = {name: load_hardware(name).with_kernel("sparge").constants for name in MACHINES}
    everything, rows = bars(), []
    others = {
        key: float(np.median([bar.other_s for bar in group if bar.other_s is not None]))
        for key, group in itertools.groupby(everything, lambda bar: bar.panel[:3])
    }
    times: dict[Bar, tuple[float, ...]] = {}
    for bar in everything:
        attention = bar_attention_s(bar, known[bar.machine], UNKNOWNS)
        read = bar.end_to_end_s - (bar.other_s or others[bar.panel[:3]])
        modelled = other_s(bar.model, known[bar.machine], bar.gpus) + attention
        times[bar] = (bar.end_to_end_s, modelled, read, attention)
    for bar, (measured, modelled, read, attention) in times.items():
        ulysses = f"U{bar.gpus}R1"
        base = times[next(other for other in everything if other.panel == bar.panel and other.way == ulysses)]
        rows.append(
            Row(
                gpus=bar.gpus,
                model=bar.model,
                machine=bar.machine,
                method=bar.method,
                way=bar.way,
                measured_s=measured,
                modelled_s=modelled,
                error=modelled / measured - 1,
                half="fitted" if bar.fitted else "held out",
                measured_attention_s=read,
                modelled_attention_s=attention,
                speedup=base[0] / measured,
                modelled_speedup=base[1] / modelled,
                attention_speedup=base[2] / read,
                modelled_attention_speedup=base[3] / attention,
                label=LABEL,
            )
        )
    return rows


def panel_of(row: Row) -> tuple[int, str, str, str]:
    return row.gpus, row.model, row.machine, row.method


def summary(rows: Sequence[Row]) -> list[str]:
    lines = []
    for half in ("fitted", "held out"):
        here = [row for row in rows if row.half == half]
        wrong, pairs = wrong_order(here)
        lines.append(
            f"{half}: {errors_in_words([row.error for row in here])}; order of two bars over {WORTH:.0%} apart: "
            f"{pairs - len(wrong)} of {pairs} right; wrong: {'; '.join(wrong)}"
        )
        for what in ("end to end", "attention"):
            theirs, ours = (_mean_gain(here, kind, what) for kind in ("measured", "modelled"))
            lines.append(
                f"{what}, db-SP, mean over bars of contiguous plans: measured {theirs:.2f}, modelled {ours:.2f}"
            )
    return lines


def wrong_order(rows: Sequence[Row]) -> tuple[list[str], int]:
    """Pairs of a panel's bars that the model has in the wrong order, in words, and how many pairs there are."""
    wrong, pairs = [], 0
    for bar, other_bar in itertools.combinations(rows, 2):
        apart = abs(bar.measured_s - other_bar.measured_s) > WORTH * min(bar.measured_s, other_bar.measured_s)
        if panel_of(bar) == panel_of(other_bar) and apart:
            pairs += 1
            if (bar.measured_s < other_bar.measured_s) != (bar.modelled_s < other_bar.modelled_s):
                wrong.append(f"{bar.model}, {bar.machine}, {bar.method}: {bar.way} and {other_bar.way}")
    return wrong, pairs


def _mean_gain(rows: Sequence[Row], kind: str, what: str) -> float:
    field = f"{kind}_attention_s" if what == "attention" else f"{kind}_s"
    seconds_of_dbsp = {panel_of(row): getattr(row, field) for row in rows if row.way == DBSP}
    return float(
        np.mean([getattr(row, field) / seconds_of_dbsp[panel_of(row)] for row in rows if row.way not in (DBSP, BURST)])
    )


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "Does the latency model find the authors' times?",
        "Seconds per video: attention in full colour, everything else pale; fitted to 8 GPUs, held out: 4 GPUs",
        4,
        columns=2,
        height=11.0,
    )
    for column, gpus in enumerate((8, 4)):
        cases = dict.fromkeys(panel_of(row)[:3] for row in rows if row.gpus == gpus)
        for axis, case in zip(axes[:, column], cases, strict=True):
            _panel(axis, [row for row in rows if panel_of(row)[:3] == case])
    for role, label in zip(
        ROLES, ("measured by the authors", "modelled, fitted to", "modelled, held out"), strict=True
    ):
        axes[0, 0].bar(0, 0, color=ROLES[role], label=label)
    legend_below(figure, axes[0, 0])
    return figure


def _panel(axis: Axes, rows: list[Row]) -> None:
    x, ticks, methods = 0.0, [], {}
    for row, after in itertools.zip_longest(rows, rows[1:]):
        for shift, total, attention, role in (
            (-0.2, row.measured_s, row.measured_attention_s, "measured"),
            (0.2, row.modelled_s, row.modelled_attention_s, row.half),
        ):
            axis.bar(x + shift, total - attention, 0.38, color=ROLES[role], alpha=0.35)
            axis.bar(x + shift, attention, 0.38, bottom=total - attention, color=ROLES[role])
        ticks.append((x, row.way.replace("Engine", "")))
        methods.setdefault(row.method, []).append(x)
        x += 1 if after is None or after.method == row.method else 1.8
    axis.set_xticks(*zip(*ticks, strict=True), fontsize=8, rotation=35)
    top = max(max(row.measured_s, row.modelled_s) for row in rows)
    for method, centres in methods.items():
        axis.text(np.mean(centres), 1.04 * top, method.replace("Attention", ""), ha="center", size=10, color=SOFT)
    worst = max(abs(row.error) for row in rows)
    axis.set_title(f"{in_words(rows[0].model)}, {rows[0].gpus} {rows[0].machine.upper()}s: within {worst:.0%}")
    axis.set(ylabel="seconds", ylim=(0, 1.18 * top))
    axis.grid(axis="x", visible=False)


BARS = Result("fig8", "End-to-end and attention time on 8 and 4 GPUs", draw)


if __name__ == "__main__":
    BARS.run(arguments(__doc__), lambda _: measure(), summary)
