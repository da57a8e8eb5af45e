"""KnapFormer's Fig. 4: what data loaders of 32 GPUs bring, stream by stream, and each GPU's work before and after.

The paper's figure shows the arrangement alone. Sequences are drawn; cost is Eq. 2, γ as its program's README has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_core.planning.sequences.streams import parse_streams
from scripts.reproduce.common import publish
from scripts.reproduce.knapformer.shared import (
    ASSUMPTIONS,
    GAMMA,
    STREAMS,
    drawn,
    knapformer_arguments,
    loads,
    pair_cost,
    share_out,
)


@dataclass(frozen=True)
class Row:
    """Of all draws. tokens_*: of a sequence;  share_*: of all streams' tokens, and of their cost"""

    stream: str
    code: str
    gpus: int
    sequences: int
    tokens_least: int
    tokens_mean: float
    tokens_most: int
    share_of_tokens: float
    share_of_cost: float
    label: str


def measure(options) -> list[Row]:
    rows = []
    for stream, text in STREAMS.items():
        steps = [drawn(stream, seed) for seed in range(options.draws)]
        tokens = np.concatenate([one.tokens for one in steps])
        cost = pair_cost().picoseconds(tokens, tokens**2)
        loader, first = np.concatenate([one.loader for one in steps]), 0
        for code in parse_streams(text):
            mine = (loader >= first) & (loader < first + code.gpus)
            first += code.gpus
            rows.append(
                Row(
                    stream,
                    str(code),
                    code.gpus,
                    code.gpus * code.batch,
                    int(tokens[mine].min()),
                    float(tokens[mine].mean()),
                    int(tokens[mine].max()),
                    float(tokens[mine].sum() / tokens.sum()),
                    float(cost[mine].sum() / cost.sum()),
                    f"drawn; {ASSUMPTIONS.in_words()}; γ {GAMMA:g}",
                )
            )
    return rows


def draw_figure(options) -> Figure:
    figure, axes = pyplot.subplots(2, len(STREAMS), figsize=(12.5, 6.5), layout="constrained")
    for column, stream in enumerate(STREAMS):
        top, bottom = axes[:, column]
        steps = [drawn(stream, seed) for seed in range(options.draws)]
        tokens = np.concatenate([one.tokens for one in steps])
        bins = np.geomspace(200, 40000, 40)
        top.hist(tokens, bins=bins, color="C0")
        top.set(xscale="log", yscale="log", title=stream, xlabel="tokens of a sequence")
        for bags, balancer, style, name in (
            ("none", "knapsack", "k-", "as loaded"),
            ("g1n32", "knapsack", "C1--", "KnapFormer's greedy, g1n32"),
            ("g8n4", "dbsp", "C2-", "dbsp, nodes of 8"),
        ):
            plan, cost = share_out(steps[0], bags, balancer)
            load = loads(plan, cost)
            bottom.step(range(len(load)), load / load.mean(), style, where="mid", label=name)
        bottom.set(ylim=(0, None), xlabel="GPU", ylabel="work over mean")
    axes[1, 0].legend(fontsize=8)
    axes[0, 0].set_ylabel(f"sequences in {options.draws} steps")
    figure.suptitle(f"drawn, not real data; {ASSUMPTIONS.in_words()}; γ {GAMMA:g}", fontsize=10)
    return figure


def main() -> None:
    options = knapformer_arguments(__doc__, draws=20).parse_args()
    rows = measure(options)
    publish("knapformer-streams", "Streams of KnapFormer's §4.1", rows, draw_figure(options), options.out)


if __name__ == "__main__":
    main()
