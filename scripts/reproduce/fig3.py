"""Fig. 3: modelled latency of a Wan2.1-14B video on 1 to 8 GPUs, contiguous Ulysses and Ring, and planner dbsp.

The two scalings that the paper states (8 GPUs) are held out: nothing was fitted to them.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_cli.simulate import RunConfig
from dbsp_core import Strategy
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.common import publish
from scripts.reproduce.modelled import MODELLED, PAPER_SCALING, machine, model_masks, modelled_arguments, video

MODEL = "wan2.1-t2v-14b"
LINES = {"Ulysses": (True, "contiguous"), "Ring": (False, "contiguous"), "db-SP, Ulysses": (True, "dbsp")}


@dataclass(frozen=True)
class Row:
    """scaling: one GPU's end-to-end time over this one; paper_scaling: §3.1"""

    line: str
    gpus: int
    rho: float
    attention_s: float
    other_s: float
    end_to_end_s: float
    attention_share: float
    scaling: float
    paper_scaling: str
    label: str


def measure(options) -> list[Row]:
    masks, hardware, model = model_masks(MODEL, options), machine(options), as_run(MODEL)
    rows = []
    for line, (ulysses, planner) in LINES.items():
        alone = 0.0
        for gpus in (1, 2, 4, 8):
            strategy = Strategy(gpus, 1) if ulysses else Strategy(1, gpus)
            found = video(RunConfig(strategy, planner), masks, model, hardware)
            attention = found.attention_s - (found.pack_s if gpus == 1 else 0)  # one GPU packs nothing
            whole = attention + found.other_s
            alone = whole if gpus == 1 else alone
            stated = PAPER_SCALING.get(str(strategy)) if planner == "contiguous" else None
            paper = f"{stated}" if stated else "> 15 minutes (§1); 16.0 by §3.1 and Fig. 8" if gpus == 1 else "–"
            share = attention / whole
            rows.append(
                Row(
                    line,
                    gpus,
                    found.rho,
                    attention,
                    found.other_s,
                    whole,
                    share,
                    alone / whole,
                    paper,
                    f"{MODELLED}, {hardware.name}",
                )
            )
    return rows


def draw(rows: list[Row]) -> Figure:
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    numbers = sorted({row.gpus for row in rows})
    for number, line in enumerate(LINES):
        here = [row for row in rows if row.line == line]
        place = [i + (number - 1) * 0.27 for i in range(len(numbers))]
        bars = left.bar(place, [row.attention_s / 60 for row in here], 0.25, label=f"{line}: attention")
        other = [row.other_s / 60 for row in here]
        left.bar(
            place,
            other,
            0.25,
            bottom=[row.attention_s / 60 for row in here],
            color=bars[0].get_facecolor(),
            alpha=0.4,
            label="everything else" if number == len(LINES) - 1 else None,
        )
        right.plot(numbers, [row.scaling for row in here], "o-", label=line)
    for (strategy, scaling), color in zip(PAPER_SCALING.items(), ("C0", "C1"), strict=True):
        right.plot(8, scaling, "*", color=color, markersize=14, markeredgecolor="k", label=f"paper, {strategy}")
    right.plot(numbers, numbers, "k:", linewidth=1, label="linear")
    left.set_xticks(range(len(numbers)), [str(n) for n in numbers])
    left.set(xlabel="GPUs", ylabel="minutes per video")
    right.set(xlabel="GPUs", ylabel="times as fast as one GPU")
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.suptitle(f"{MODEL}: {rows[0].label}")
    return figure


def main() -> None:
    options = modelled_arguments(__doc__, layers=2).parse_args()
    rows = measure(options)
    publish("fig3", "Latency over the number of GPUs", rows, draw(rows), options.out)


if __name__ == "__main__":
    main()
