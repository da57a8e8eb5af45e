"""KnapFormer's Table 1, rebuilt: latency of forward and backward (FBL), tokens a second (TPS) and HFU on 32 GPUs.

A step is taken to last as long as three things together, each of the slowest rank:

- computing: four forward passes' FLOP (backward does one again and takes two), attention's times γ (Eq. 2), at a rate;
- the link within a node: q, k, v and outputs, forward, again and backward, and the weights, which FSDP gathers forward
  and backward and whose gradients it sums, all at one bandwidth. Where each bag is one rank, nothing is exchanged and
  weights are sent behind computing; where bags exchange, computing waits, and weights share the link;
- ordering: KnapFormer's program takes what comes in apart, into each rank's piece of each sequence, and puts these
  together again, on the host, whose time nothing hides, as each attention reads a length back from the GPU. Ours
  permutes all by one index, whose time is not in this model.

Rate and bandwidth are **fitted** to two rows, the host's time for a piece is **measured** on a CPU core; other rows of
Table 1 are held out. What is exchanged before and after all layers is left out: a hundredth of a second.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure

from dbsp_core.planning.sequences import PICO
from scripts.reproduce.knapformer.shared import (
    FLOPS_PER_S,
    FLUX,
    GAMMA,
    LAYERS,
    MIXED,
    TABLE_1,
    TOPOLOGIES,
    WIDTH,
    WORLD,
    by_ranks,
    dense_work,
    drawn,
    knapformer_arguments,
)
from scripts.results.colours import PLANNERS, ROLES
from scripts.results.figures import legend_below, panels
from scripts.results.result import Result, Row

LOW = "low-resolution images"
FITTED = ((LOW, "g1n32"), (MIXED, "g4n8"))
"""One row of each stream: of those without an exchange the most even, and the middle one of those with exchanges."""
PEAK_FLOPS = 989e12  # of an H100, bfloat16, dense; published
FORWARDS = 4  # what a step computes: forward, forward again in backward (checkpointing), and backward, which is two
EXCHANGED = 3  # how often a layer's exchanges are done: forward, again, and backward
PARAMETERS, SHARDS = 12e9, 8
"""Of FLUX (Table 1's caption); ranks that share weights in KnapFormer's program: FSDP2 within a node."""
WEIGHT_BYTES = PARAMETERS * (1 - 1 / SHARDS) * (2 + 2 + 4)
"""To each rank in a step: weights twice, bfloat16, and gradients, float32."""
ERRORS = ("error", "simple_error")
PIECE_S = 3.2e-6  # the host's time to order a piece, as `--measure` found it on a CPU core
ORDERINGS = 2 * LAYERS  # of a bag's pieces, each forward, again and backward: before attention and after it


@dataclass(frozen=True)
class Load:
    """Work of a step's slowest rank; means over draws."""

    tokens: float
    flop: float
    weighted_flop: float  # attention's times γ
    sent_bytes: float  # q, k, v and outputs, all layers
    pieces: float  # of sequences, that one ordering of KnapFormer's program has in the fullest bag

    def link_bytes(self, weights: float = WEIGHT_BYTES) -> float:
        return self.sent_bytes + weights if self.sent_bytes else 0.0


@dataclass(frozen=True)
class Rates:
    flops_per_s: float
    bytes_per_s: float
    piece_s: float

    def seconds(self, load: Load, weights: float = WEIGHT_BYTES) -> tuple[float, float, float]:
        """Computing, the link, and ordering."""
        ordering = ORDERINGS * self.piece_s * load.pieces
        return load.weighted_flop / self.flops_per_s, load.link_bytes(weights) / self.bytes_per_s, ordering


def load_of(stream: str, bags: str, balancer: str, draws: int) -> Load:
    loads = []
    for sequences in (drawn(stream, seed) for seed in range(draws)):
        plan, counted = by_ranks(sequences, dense_work(sequences), bags, balancer)
        tokens, ranks = sequences.tokens.astype(float), plan.topology.ranks
        pieces = np.where(ranks > 1, np.bincount(plan.bag, minlength=len(ranks)) * ranks, 0)
        loads.append(
            (
                tokens.sum(),
                FORWARDS * LAYERS * (FLUX.token_flops * tokens + 4 * WIDTH * tokens**2).sum(),
                FORWARDS * LAYERS * int(counted.picoseconds.max()) / PICO * FLOPS_PER_S,
                EXCHANGED * LAYERS * counted.sent_bytes.max(),
                pieces.max() if balancer == "knapsack" else 0,
            )
        )
    return Load(*np.mean(loads, axis=0).tolist())


def fit(loads: list[Load], seconds: list[float], piece_s: float, weights: float = WEIGHT_BYTES) -> Rates:
    """The rate and the bandwidth by which two rows' steps last as long as they did."""
    used = [[load.weighted_flop, load.link_bytes(weights)] for load in loads]
    left = [s - ORDERINGS * piece_s * load.pieces for load, s in zip(loads, seconds, strict=True)]
    by_flop, by_byte = np.linalg.solve(used, left)
    return Rates(float(1 / by_flop), float(1 / by_byte), piece_s)


def piece_seconds(pieces: int = 2048, repeats: int = 25) -> float:
    """The host's time to order one piece of many, forward twice and backward once: the least of some, one CPU core."""
    torch.set_num_threads(1)
    buffer, order = torch.zeros(pieces, requires_grad=True), np.random.default_rng(0).permutation(pieces).tolist()
    forward, both = [], []
    for _ in range(repeats):
        start = time.process_time()
        parts = buffer.split([1] * pieces)
        ordered = torch.cat([parts[piece] for piece in sorted(range(pieces), key=order.__getitem__)])
        forward.append(time.process_time() - start)
        ordered.backward(torch.ones_like(ordered))
        both.append(time.process_time() - start)
    return (min(forward) + min(both)) / pieces


def rebuild(draws: int, piece_s: float) -> tuple[list[Row], Rates]:
    loads = {(stream, bags): load_of(stream, bags, "knapsack", draws) for stream in TABLE_1 for bags in TOPOLOGIES}
    chosen, lasted = [loads[key] for key in FITTED], [TABLE_1[stream][bags].fbl_s for stream, bags in FITTED]
    rates, simple = fit(chosen, lasted, piece_s), fit(chosen, lasted, 0.0, weights=0.0)
    rows = []
    for (stream, bags), load in loads.items():
        rows.append(_row(stream, bags, load, rates, simple))
        if bags != "none":
            rows.append(_row(stream, bags, load_of(stream, bags, "dbsp", draws), rates, None))
    return rows, rates


def _row(stream: str, bags: str, load: Load, rates: Rates, simple: Rates | None) -> Row:
    """Times, and how far they are off; tokens_off, flop_off: of what was drawn, from what the paper's numbers imply.

    simple: fitted without weights and ordering; None for a row of ours, which the paper does not have
    """
    parts, paper = rates.seconds(load), TABLE_1[stream][bags]
    fbl, flops_per_s = sum(parts), WORLD * PEAK_FLOPS
    theirs = simple is not None
    return Row(
        stream=stream,
        bags=bags,
        balancer="–" if bags == "none" else "KnapFormer's, rebuilt" if theirs else "dbsp",
        role="ours" if not theirs else "fitted" if (stream, bags) in FITTED else "held out",
        paper_fbl_s=paper.fbl_s if theirs else "–",
        fbl_s=fbl,
        error=fbl / paper.fbl_s - 1 if theirs else "–",
        simple_error=sum(simple.seconds(load, weights=0.0)) / paper.fbl_s - 1 if simple else "–",
        paper_tps=round(paper.tps) if theirs else "–",
        tps=round(load.tokens / fbl),
        paper_hfu=paper.hfu if theirs else "–",
        hfu=load.flop / (flops_per_s * fbl),
        **dict(zip(PARTS, parts, strict=True)),
        tokens_off=load.tokens / (paper.tps * paper.fbl_s) - 1 if theirs else "–",
        flop_off=load.flop / (paper.hfu * flops_per_s * paper.fbl_s) - 1 if theirs else "–",
        label=f"modelled, drawn sequences; γ {GAMMA:g} published; {rates.flops_per_s / 1e12:.0f} TFLOP/s, "
        f"{rates.bytes_per_s / 1e9:.0f} GB/s fitted; {rates.piece_s * 1e6:.2g} µs a piece measured on a CPU",
    )


PARTS = {
    "compute_s": ("computing", ROLES["held out"], PLANNERS["dbsp"]),
    "link_s": ("exchange and weights", "#6db5b1", "#86b0da"),
    "ordering_s": ("ordering", "#c4e0de", "#c9dcee"),
}
"""By part of a step: in words, and its colours in KnapFormer's, rebuilt, and in ours."""


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "How long does a training step last on 32 H100s, and why?",
        "FLUX, forward and backward\n" + rows[0].label,
        columns=len(TABLE_1),
        height=5.4,
        sharey=True,
    )
    width = 0.27
    for axis, (stream, paper) in zip(axes[0], TABLE_1.items(), strict=True):
        columns = np.arange(len(paper))
        measured = [row.fbl_s for row in paper.values()]
        axis.bar(columns - width, measured, 0.95 * width, color=ROLES["measured"], label="KnapFormer's, measured")
        for shift, theirs, name in ((0.0, True, "rebuilt"), (width, False, "ours, modelled")):
            mine = [row for row in rows if row.stream == stream and (row.role != "ours") == theirs]
            x = np.array([list(paper).index(row.bags) + shift for row in mine])
            bottom = np.zeros(len(mine))
            for part, (words, rebuilt, ours) in PARTS.items():
                height, colour = np.array([getattr(row, part) for row in mine]), rebuilt if theirs else ours
                if height.any():
                    axis.bar(x, height, 0.95 * width, bottom, color=colour, label=f"{name}: {words}")
                bottom += height
            for row, left, top in zip(mine, x, bottom, strict=True):
                if isinstance(row.error, float):
                    text = "fitted" if row.role == "fitted" else f"{row.error:+.1%}"
                    axis.text(left, max(top, paper[row.bags].fbl_s) + 0.06, text, ha="center", fontsize=9)
        axis.set_xticks(columns, ["no bags", *list(paper)[1:]])
        axis.grid(axis="x", visible=False)
        axis.set(title=stream, ylim=(0, 5.4))
    axes[0, 0].set_ylabel("seconds")
    legend_below(figure, axes.flat, columns=3)
    return figure


LATENCY = Result("knapformer-throughput", "FBL, TPS and HFU, KnapFormer's Table 1", draw)


def measure(options: argparse.Namespace) -> list[Row]:
    return rebuild(options.draws, piece_seconds() if options.measure else PIECE_S)[0]


def summary(rows: list[Row]) -> list[str]:
    worst = [max(abs(getattr(row, name)) for row in rows if row.role == "held out") for name in ERRORS]
    return ["held-out rows are off by at most {:.1%}, without weights and ordering by {:.1%}".format(*worst)]


if __name__ == "__main__":
    parser = knapformer_arguments(__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the host's time to order a piece here")
    LATENCY.run(parser, measure, summary)
