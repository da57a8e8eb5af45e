"""Fig. 3: modelled latency of a Wan2.1-14B video on 1 to 8 GPUs, contiguous Ulysses and Ring, and planner dbsp.

The two scalings that the paper states (8 GPUs) are held out: nothing was fitted to them. On top of blocks and
exchanges each line takes what the authors' scripts of it do, which is less under db-SP.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from matplotlib.figure import Figure

from dbsp_core import Strategy
from dbsp_core.reports.style import INK
from scripts.reproduce.authors.fit import in_scripts
from scripts.reproduce.authors.measured import DBSP, PARO
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.common import masks
from scripts.reproduce.modelled import machine, modelled_arguments, modelled_video
from scripts.results.colours import PLANNERS, STRATEGIES
from scripts.results.figures import STAR, grouped_bars, in_words, legend_below, panels
from scripts.results.result import Result, Row

MODEL = "wan2.1-t2v-14b"
PAPER_SCALING = {"U8R1": 6.09, "U1R8": 5.81}  # §3.1: on 8 GPUs over one GPU, contiguous plans
LINES = {"Ulysses": (True, "contiguous"), "Ring": (False, "contiguous"), "db-SP, Ulysses": (True, "dbsp")}


def measure(options: argparse.Namespace) -> Iterator[Row]:
    layers, hardware, model = list(masks(MODEL, options)), machine(options), as_run(MODEL)
    for line, (ulysses, planner) in LINES.items():
        alone_s = 0.0
        known = in_scripts(hardware, DBSP if planner == "dbsp" else PARO, MODEL)
        for gpus in (1, 2, 4, 8):
            strategy = Strategy(gpus, 1) if ulysses else Strategy(1, gpus)
            video = modelled_video(strategy, planner, layers, model, known)
            whole_s = video.attention_s + video.other_s
            alone_s = alone_s or whole_s
            stated = PAPER_SCALING.get(str(strategy)) if planner == "contiguous" else None
            paper = f"{stated}" if stated else "> 15 minutes (§1); 16.0 by §3.1 and Fig. 8" if gpus == 1 else "–"
            yield Row(
                line=line,
                gpus=gpus,
                **vars(video),
                end_to_end_s=whole_s,
                attention_share=video.attention_s / whole_s,
                scaling=alone_s / whole_s,
                paper_scaling=paper,
                label=f"modelled, synthetic masks, {hardware.name}",
            )


COLOURS = dict(zip(LINES, (STRATEGIES["U8R1"], STRATEGIES["U1R8"], PLANNERS["dbsp"]), strict=True))


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        f"How long does a {in_words(MODEL)} video take on 1 to 8 GPUs?",
        f"{rows[0].label}; ★ the paper's measured scaling, to which nothing was fitted",
        columns=2,
    )
    left, right = axes[0]
    numbers = sorted({row.gpus for row in rows})
    by_line = {line: [row for row in rows if row.line == line] for line in LINES}
    attention = {line: [row.attention_s / 60 for row in here] for line, here in by_line.items()}
    grouped_bars(left, [str(n) for n in numbers], attention, COLOURS)
    for bars, here in zip(list(left.containers), by_line.values(), strict=True):
        for bar, row in zip(bars, here, strict=True):
            left.bar(
                bar.get_x(), row.other_s / 60, bar.get_width(), bottom=bar.get_height(), align="edge", color="#e4e1db"
            )
    left.bar(0, 0, color="#e4e1db", label="everything but attention")
    left.set(xlabel="GPUs", ylabel="minutes per video", title="Attention (coloured) and everything else")
    for line, here in by_line.items():
        right.plot(numbers, [row.scaling for row in here], "o-", color=COLOURS[line])
    for scaling, line in zip(PAPER_SCALING.values(), LINES, strict=False):
        right.plot(8, scaling, **{**STAR, "color": COLOURS[line], "markeredgecolor": INK})
    right.plot(numbers, numbers, ":", color=INK, linewidth=1)
    right.text(7, 7.2, "as many times as GPUs", ha="right", size=10)
    right.set(xlabel="GPUs", ylabel="times as fast as one GPU", title="Scaling", xticks=numbers)
    legend_below(figure, left)
    return figure


SCALING = Result("fig3", "Latency over the number of GPUs", draw)


if __name__ == "__main__":
    SCALING.run(modelled_arguments(__doc__, layers=0), measure)
