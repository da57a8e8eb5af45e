"""KnapFormer's Table 1: workload imbalance ratio (WIR) on 32 GPUs, the paper's, its method rebuilt, and ours.

γ is what the README of KnapFormer's program runs with; nothing is fitted. WIR by Eq. 2 is the paper's; by ranks counts
each rank's tokens and dense blocks of 64 × 64 tokens, with the attention's rows where the plan puts them. A mean over
draws; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_core.cost.sequences import FLUX, SequenceWork
from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.streams import DrawnSequences
from dbsp_core.sources import MaskRequest, SyntheticSource
from scripts.reproduce.common import publish
from scripts.reproduce.knapformer.shared import (
    GAMMA,
    STREAMS,
    TABLE_1,
    TOPOLOGIES,
    WORLD,
    by_ranks,
    dense_work,
    drawn,
    knapformer_arguments,
    loads,
    share_out,
)

SPARSE_DENSITY = 0.3


@dataclass(frozen=True)
class Row:
    """wir: by Eq. 2, mean over draws;  wir_of_ranks, its worst draw, and rho: counted by rank, in blocks
    moved: share of tokens that are not where they were loaded
    """

    stream: str
    mask: str
    bags: str
    balancer: str
    largest_bag: int
    gamma: float
    paper: str
    wir: float | str
    wir_of_ranks: float
    worst: float
    rho: float
    moved: float
    label: str


def ratio(values: np.ndarray) -> float:
    return float(values.max() / values.min())


def sparse_work(sequences: DrawnSequences) -> SequenceWork:
    source = SyntheticSource(density=SPARSE_DENSITY)
    texts_and_sizes = zip(sequences.text.tolist(), sequences.thw.tolist(), strict=True)
    return SequenceWork.of(
        [source.mask(MaskRequest(0, FLUX.heads, tuple(thw), text)) for text, thw in texts_and_sizes]
    )


def measure(options) -> Iterator[Row]:
    hidden = FLUX.width * FLUX.element_bytes
    cases = [(stream, "dense", bags) for stream in STREAMS for bags in TOPOLOGIES]
    cases += [(stream, "sparse", bags) for stream in list(STREAMS)[1:] for bags in ("g4n8", "g8n4")]
    made: dict[tuple[str, str], list[tuple[DrawnSequences, SequenceWork]]] = {}
    for stream, mask, bags in cases:
        if (stream, mask) not in made:
            steps = [drawn(stream, seed) for seed in range(options.draws if mask == "dense" else options.sparse_draws)]
            work_of = dense_work if mask == "dense" else sparse_work
            made[stream, mask] = [(one, work_of(one)) for one in steps]
        for balancer in ("knapsack",) if bags == "none" else ("knapsack", "dbsp"):
            equation, counted = [], []
            for sequences, work in made[stream, mask]:
                plan, cost = share_out(sequences, bags, balancer)
                equation.append(ratio(loads(plan, cost)))
                counted.append(by_ranks(sequences, work, bags, balancer)[1])
            paper = TABLE_1.get(stream, {}).get(bags) if mask == "dense" else None
            yield Row(
                stream,
                f"density {SPARSE_DENSITY}" if mask == "sparse" else mask,
                bags,
                "–" if bags == "none" else "KnapFormer's, rebuilt" if balancer == "knapsack" else "dbsp",
                BagTopology.parse(TOPOLOGIES[bags], WORLD).sizes[0],
                GAMMA,
                "–" if paper is None else f"{paper.wir:.2f}",
                float(np.mean(equation)) if mask == "dense" else "–",
                float(np.mean([one.wir for one in counted])),
                max(one.wir for one in counted),
                max(one.rho for one in counted),
                float(np.mean([one.rehomed_bytes / (hidden * one.tokens.sum()) for one in counted])),
                "counted, drawn sequences, modelled cost",
            )


def draw_figure(rows: list[Row]) -> Figure:
    figure, axes = pyplot.subplots(1, len(STREAMS), figsize=(12, 4), layout="constrained")
    for axis, stream in zip(axes, STREAMS, strict=True):
        here = [row for row in rows if row.stream == stream and row.mask == "dense"]
        for number, balancer in enumerate(("KnapFormer's, rebuilt", "dbsp")):
            mine = {row.bags: row.wir_of_ranks - 1 for row in here if row.balancer == balancer}
            place = [list(TOPOLOGIES).index(bags) + (number - 0.5) * 0.3 for bags in mine]
            axis.bar(place, list(mine.values()), 0.28, label=balancer)
        axis.bar(
            0, next(row.wir_of_ranks - 1 for row in here if row.bags == "none"), 0.28, color="0.6", label="as loaded"
        )
        paper = {bags: row.wir - 1 for bags, row in TABLE_1.get(stream, {}).items() if row.wir > 1}
        axis.plot(
            [list(TOPOLOGIES).index(bags) for bags in paper], list(paper.values()), "k*", markersize=11, label="paper"
        )
        axis.axhline(0.005, color="k", linestyle=":", linewidth=1)
        axis.set_xticks(range(len(TOPOLOGIES)), list(TOPOLOGIES))
        axis.set(yscale="log", title=stream, ylabel="WIR − 1", ylim=(5e-5, 60))
        axis.legend(fontsize=8)
    figure.suptitle(f"32 GPUs, dense attention, γ {GAMMA:g}; dotted: 1.005. {rows[0].label}", fontsize=10)
    return figure


def main() -> None:
    parser = knapformer_arguments(__doc__, draws=20)
    parser.add_argument("--sparse-draws", type=int, default=3, help="of them, for sparse masks, which take longer")
    options = parser.parse_args()
    rows = list(measure(options))
    publish("knapformer-wir", "Workload imbalance ratio, KnapFormer's Table 1", rows, draw_figure(rows), options.out)


if __name__ == "__main__":
    main()
