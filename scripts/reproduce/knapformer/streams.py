"""KnapFormer's Fig. 4: what data loaders of 32 GPUs bring, stream by stream, and each GPU's work before and after.

The paper's figure shows the arrangement alone. Sequences are drawn; cost is Eq. 2, γ as its program's README has it.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from dbsp_core.reports.style import rank_colour
from examples.data_codes import ASSUMED, parse_streams
from scripts.reproduce.knapformer.shared import (
    COLOURS,
    GAMMA,
    STREAMS,
    distribute,
    drawn,
    knapformer_arguments,
    loads,
    pair_cost,
)
from scripts.results.figures import legend_below, panels
from scripts.results.result import Result, Row


def measure(options) -> list[Row]:
    rows = []
    for stream, text in STREAMS.items():
        steps = [drawn(stream, seed) for seed in range(options.draws)]
        tokens = np.concatenate([sequences.tokens for sequences in steps])
        cost = pair_cost().picoseconds(tokens, tokens**2)
        loader, first = np.concatenate([sequences.loader for sequences in steps]), 0
        for code in parse_streams(text):
            mine = (loader >= first) & (loader < first + code.gpus)
            first += code.gpus
            rows.append(
                Row(
                    stream=stream,
                    code=str(code),
                    gpus=code.gpus,
                    sequences=code.gpus * code.batch,
                    tokens_least=int(tokens[mine].min()),
                    tokens_mean=float(tokens[mine].mean()),
                    tokens_most=int(tokens[mine].max()),
                    share_of_tokens=float(tokens[mine].sum() / tokens.sum()),
                    share_of_cost=float(cost[mine].sum() / cost.sum()),
                    label=f"drawn; {ASSUMED}; γ {GAMMA:g}",
                )
            )
    return rows


def draw(rows: list[Row]) -> Figure:
    """The lower panels distribute one step's sequences, drawn anew from their seed: the CSV has sums of all steps."""
    figure, axes = panels(
        "What do the data loaders of 32 GPUs bring, and how is it distributed?",
        f"Sequences are drawn, not real data; γ {GAMMA:g}\n{ASSUMED}",
        2,
        len(STREAMS),
        height=6.6,
        sharey="row",
    )
    for column, stream in enumerate(STREAMS):
        top, bottom = axes[:, column]
        here = [row for row in rows if row.stream == stream]
        left = [0.0, 0.0, 0.0]
        for number, row in enumerate(sorted(here, key=lambda row: row.tokens_mean)):
            parts = [row.sequences / sum(one.sequences for one in here), row.share_of_tokens, row.share_of_cost]
            top.bar(["sequences", "tokens", "work"], parts, 0.7, left, color=rank_colour(number))
            middle = left[2] + parts[2] / 2
            if parts[2] > 0.12:
                top.text(2, middle, f"{row.tokens_mean:,.0f}", ha="center", va="center", size=9, color="white")
            left = [one + part for one, part in zip(left, parts, strict=True)]
        top.set(title=stream, ylim=(0, 1))
        top.grid(axis="x", visible=False)
        step = drawn(stream, 0)
        for bags, balancer, style, name in (
            ("none", "knapsack", "-", "as loaded"),
            ("g1n32", "knapsack", "--", "KnapFormer's, rebuilt"),
            ("g8n4", "dbsp", "-", "dbsp"),
        ):
            plan, cost = distribute(step, bags, balancer)
            load = loads(plan, cost)
            words = {"KnapFormer's, rebuilt": "KnapFormer's greedy, bags of one", "dbsp": "dbsp, bags of a node"}
            bottom.step(
                range(len(load)),
                load / load.mean(),
                style,
                where="mid",
                color=COLOURS[name],
                label=words.get(name, name),
            )
        bottom.set_xlabel("GPU")
        bottom.margins(y=0.08)
    axes[1, 0].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("share, by loader\n(mean tokens in white)")
    axes[1, 0].set_ylabel("work of one step\nover the mean")
    legend_below(figure, axes[1, 0])
    return figure


LOADED = Result("knapformer-streams", "Streams of KnapFormer's §4.1", draw)


if __name__ == "__main__":
    LOADED.run(knapformer_arguments(__doc__), measure)
