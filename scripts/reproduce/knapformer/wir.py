"""KnapFormer's Table 1: workload imbalance ratio (WIR) on 32 GPUs, the paper's, its method rebuilt, and ours.

γ is what the README of KnapFormer's program runs with; nothing is fitted. WIR by Eq. 2 is the paper's; by ranks counts
each rank's tokens and active blocks of 64 × 64 tokens, with the attention's rows where the plan puts them. A mean over
draws; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dbsp_core.cost.sequence_cost import SequenceWork
from dbsp_core.planning.bags import BagTopology
from dbsp_core.sources import MaskRequest, SyntheticSource
from examples.data_codes import DrawnSequences
from scripts.reproduce.knapformer.counted import work_of
from scripts.reproduce.knapformer.shared import (
    FLUX,
    GAMMA,
    STREAMS,
    TABLE_1,
    TOPOLOGIES,
    WORLD,
    by_ranks,
    dense_work,
    distribute,
    drawn,
    knapformer_arguments,
    loads,
)
from scripts.results.result import Result, Row

SPARSE_DENSITY = 0.3


def sparse_work(sequences: DrawnSequences) -> SequenceWork:
    source = SyntheticSource(density=SPARSE_DENSITY)
    texts_and_sizes = zip(sequences.text.tolist(), sequences.thw.tolist(), strict=True)
    return work_of([source.mask(MaskRequest(0, FLUX.heads, tuple(thw), text)) for text, thw in texts_and_sizes])


def measure(options) -> Iterator[Row]:
    cases = [(stream, "dense", bags) for stream in STREAMS for bags in TOPOLOGIES]
    cases += [(stream, "sparse", bags) for stream in list(STREAMS)[1:] for bags in ("g4n8", "g8n4")]
    made: dict[tuple[str, str], list[tuple[DrawnSequences, SequenceWork]]] = {}
    for stream, mask, bags in cases:
        if (stream, mask) not in made:
            steps = [drawn(stream, seed) for seed in range(options.draws if mask == "dense" else options.sparse_draws)]
            count = dense_work if mask == "dense" else sparse_work
            made[stream, mask] = [(sequences, count(sequences)) for sequences in steps]
        for balancer in ("knapsack",) if bags == "none" else ("knapsack", "dbsp"):
            equation, counted = [], []
            for sequences, work in made[stream, mask]:
                plan, cost = distribute(sequences, bags, balancer)
                load = loads(plan, cost)
                equation.append(float(load.max() / load.min()))
                counted.append(by_ranks(sequences, work, bags, balancer)[1])
            paper = TABLE_1.get(stream, {}).get(bags) if mask == "dense" else None
            yield Row(
                stream=stream,
                mask=f"density {SPARSE_DENSITY}" if mask == "sparse" else mask,
                bags=bags,
                balancer="–" if bags == "none" else "KnapFormer's, rebuilt" if balancer == "knapsack" else "dbsp",
                largest_bag=BagTopology.parse(TOPOLOGIES[bags], WORLD).sizes[0],
                gamma=GAMMA,
                paper="–" if paper is None else f"{paper.wir:.2f}",
                wir=float(np.mean(equation)) if mask == "dense" else "–",  # by Eq. 2
                wir_of_ranks=float(np.mean([metrics.wir for metrics in counted])),
                worst=max(metrics.wir for metrics in counted),
                rho=max(metrics.rho for metrics in counted),
                moved=float(np.mean([metrics.moved / metrics.tokens.sum() for metrics in counted])),  # of all tokens
                label="counted, drawn sequences, modelled cost",
            )


if __name__ == "__main__":
    parser = knapformer_arguments(__doc__)
    parser.add_argument("--sparse-draws", type=int, default=3, help="of them, for sparse masks, which take longer")
    Result("knapformer-wir", "Workload imbalance ratio, KnapFormer's Table 1").run(parser, measure)
