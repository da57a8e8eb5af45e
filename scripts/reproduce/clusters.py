"""Figures of the papers' own clusters, modelled: db-SP's two servers (§6), and DSV's nodes of H100s (§9).

db-SP: end-to-end and attention speed-up of planner dbsp over plain Ulysses and Ring, on a800 and h800.
DSV: training and inference on nodes of 8 H100s, and one attention's speed-up, over full attention and a window.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsp_cli.simulate import simulate
from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.reports.style import INK, PLANNERS, ROLES
from dbsp_core.sources import MaskRequest, SyntheticSource
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.modelled import MODELLED, PAPER_ATTENTION, PAPER_END_TO_END, model_masks, modelled_arguments
from scripts.reproduce.training_cost import predict_backward
from scripts.results.figures import in_words, legend_below, panels
from scripts.results.result import Result

HEADS, WIDTH, LAYERS, PARAMETERS = 16, 128, 32, 2.7e9
"""DSV's 2.7B model (its Table 1)."""
DENSITY, WINDOW_DENSITY = 0.1, 0.3
"""Of DSV's masks: assumed, its text gives 90 % for kernels (§9.3.2). WA-L: about 70 % sparse (§9.2.1)."""
BLOCK = 256


@dataclass(frozen=True)
class Row:
    """theirs: as the paper's text has it;  least, most: modelled, over what the figure ranges over"""

    paper: str
    figure: str
    cluster: str
    theirs: str
    least: float
    most: float
    assumed: str
    label: str = MODELLED


def dsv_nodes() -> Hardware:
    """Nodes of 8 H100s with 200 Gb/s of network a GPU (DSV §9), of which 80 % are taken."""
    known = load_hardware("h100")
    return replace(known, name="DSV's nodes", constants=replace(known.constants, network_bytes_per_s=2.0e10))


def db_sp_rows(options: argparse.Namespace) -> Iterator[Row]:
    for name in ("a800", "h800"):
        for (preset, gpus), (low, high) in PAPER_END_TO_END.items():
            masks = model_masks(preset, options)
            hardware = load_hardware(name).with_kernel("sparge")
            rows = simulate(as_run(preset), masks, hardware, [gpus], ["contiguous", "dbsp"])
            ours = [row for row in rows if row.planner == "dbsp"]
            whole, mean = [row.speedup for row in ours], "theirs: least and largest mean, machines together"
            yield Row(
                "db-SP §6.2",
                f"{preset}, end to end",
                f"{gpus} × {name}",
                f"{low}–{high}",
                min(whole),
                max(whole),
                mean,
            )
            for strategy, theirs in ((s, value) for (s, n), value in PAPER_ATTENTION.items() if n == gpus):
                (one,) = (row.attention_speedup for row in ours if row.strategy == strategy)
                what = f"{preset}, attention over {strategy}"
                yield Row(
                    "db-SP §6.2", what, f"{gpus} × {name}", str(theirs), one, one, "mean over models and machines"
                )


@dataclass(frozen=True)
class Times:
    """Seconds of one attention, forward and backward."""

    forward: float
    backward: float


def attention_of(tokens: int, strategy: str, density: float, hardware: Hardware) -> Times:
    """Of the 2.7B model's; 1.0 is full attention. Uneven heads are balanced by planner dbsp."""
    grid, parsed = BlockGrid.uniform(tokens, BLOCK), Strategy.parse(strategy)
    if density == 1:
        mask = BlockMask(np.ones((HEADS, grid.nq, grid.nk), dtype=bool), grid)
    else:
        source = SyntheticSource(BLOCK, BLOCK, density=density)
        mask = BlockMask(source.mask(MaskRequest(0, HEADS, (1, 1, tokens))).bits, grid)
    layout, shape = SequenceLayout.striped(grid, parsed), AttentionShape(1, HEADS, tokens, WIDTH)
    plan, topology = make_plan(mask, parsed, layout=layout), Topology.on(hardware, parsed.world)
    return Times(*(one(plan, shape, hardware, topology, layout).total_s for one in (predict, predict_backward)))


def step_s(attention: Times, tokens: int, gpus: int, hardware: Hardware, training: bool) -> float:
    """A forward pass, or a training step with gradient checkpointing (§9): forward twice, backward once."""
    linear = 2 * PARAMETERS * tokens / gpus / hardware.constants.linear_flops_per_s
    if not training:
        return LAYERS * attention.forward + linear
    return LAYERS * (2 * attention.forward + attention.backward) + 4 * linear


def dsv_rows(lengths: tuple[int, ...]) -> Iterator[Row]:
    hardware = dsv_nodes()
    assumed = f"2.7B model, density {DENSITY} (window {WINDOW_DENSITY}), no predictor, no gradients' exchange"
    found = {}
    for tokens, context, (full, window) in zip(
        lengths, (4, 8), (("2.73–3.02", "1.51–1.71"), ("2.41–2.93", "1.34–1.62")), strict=True
    ):
        times = {d: attention_of(tokens, f"U{context}R1", d, hardware) for d in (1.0, WINDOW_DENSITY, DENSITY)}
        for training in (True, False):
            steps = {d: step_s(one, tokens, context, hardware, training) for d, one in times.items()}
            found[tokens, training] = steps[1.0] / steps[DENSITY], steps[WINDOW_DENSITY] / steps[DENSITY]
        cluster = f"{8 * context} × H100, CP {context}, {tokens // 1000}K tokens"
        over_full, over_window = found[tokens, True]
        yield Row("DSV §9.2.1", "training over full attention", cluster, full, over_full, over_full, assumed)
        yield Row("DSV §9.2.1", "training over a window", cluster, window, over_window, over_window, assumed)
    for index, (name, theirs) in enumerate((("full attention", "2.0–3.5"), ("a window", "1.4–2.6"))):
        ratios = [found[tokens, False][index] for tokens in lengths]
        yield Row("DSV §9.2.2", f"inference over {name}", "H100", theirs, min(ratios), max(ratios), assumed)
    sizes = (10_240, 51_200, 102_400)
    full_ones = {tokens: attention_of(tokens, "U1R1", 1.0, hardware) for tokens in sizes}
    sparse = {tokens: attention_of(tokens, "U1R1", DENSITY, hardware) for tokens in sizes}
    for part, theirs in (("forward", "2.2–5.7"), ("backward", "3.3–4.0")):
        ratios = [getattr(full_ones[n], part) / getattr(sparse[n], part) for n in sizes]
        yield Row(
            "DSV Fig. 18", f"attention's {part} at 90 %", "1 × H100", theirs, min(ratios), max(ratios), "no predictor"
        )
    sparsest = attention_of(sizes[-1], "U1R1", 0.02, hardware)
    ratio = full_ones[sizes[-1]].forward / sparsest.forward
    yield Row("DSV Fig. 17", "attention's forward at 98 %", "1 × H100", "> 15", ratio, ratio, "no predictor")


MACHINES = {"a800": ("o", PLANNERS["dbsp"]), "h800": ("D", "#4fa89b"), "H100": ("s", ROLES["held out"])}


def draw(rows: list[Row]) -> Figure:
    """A line for each figure: what the paper has, and beside it what the model has on each of its machines."""
    figure, axes = panels(
        "How do modelled gains compare with those that the papers measured?",
        f"Thick: measured by the papers, over what the figure ranges over; markers: {rows[0].label}",
        2,
        height=8.6,
        height_ratios=(12, 9),
    )
    ours = [row for row in rows if row.paper.startswith("db-SP")]
    _compare(axes[0, 0], ours)
    axes[0, 0].set_title("db-SP over plain plans: balance alone gives less")
    _compare(axes[1, 0], [row for row in rows if row not in ours])
    axes[1, 0].set_title("DSV: more, under masks that are assumed")
    axes[1, 0].set_xscale("log")
    axes[1, 0].set_xticks([1, 1.5, 2, 3, 5, 10, 20, 30], ["1", "1.5", "2", "3", "5", "10", "20", "30"])
    axes[1, 0].minorticks_off()
    axes[1, 0].set_xlabel("times as fast (1: no gain)")
    legend_below(figure, axes.flat)
    return figure


def _compare(axis: Axes, rows: list[Row]) -> None:
    lines = list(dict.fromkeys(_line(row) for row in rows))
    for row in rows:
        place = lines.index(_line(row))
        theirs = [float(part) for part in row.theirs.removeprefix("> ").split("–")]
        axis.plot([theirs[0], theirs[-1]], [place] * 2, color=ROLES["measured"], linewidth=7, solid_capstyle="butt")
        if theirs[0] == theirs[-1]:
            axis.plot(theirs[0], place, "|", color=ROLES["measured"], markersize=12, markeredgewidth=4)
        machine = next(name for name in MACHINES if name in row.cluster)
        marker, colour = MACHINES[machine]
        low = place + (0.27 if machine == "h800" else -0.27)
        axis.plot([row.least, row.most], [low] * 2, marker=marker, color=colour, markersize=5, linewidth=2)
    axis.plot([], [], color=ROLES["measured"], linewidth=7, label="measured by the papers")
    for machine, (marker, colour) in MACHINES.items():
        if any(machine in row.cluster for row in rows):
            axis.plot([], [], marker=marker, color=colour, markersize=5, label=f"modelled, {machine.upper()}")
    axis.axvline(1, color=INK, linewidth=1)
    axis.set_yticks(range(len(lines)), lines)
    axis.set_ylim(len(lines) - 0.4, -0.6)


def _line(row: Row) -> str:
    model, _, figure = row.figure.partition(", ")
    if row.paper.startswith("db-SP"):
        return f"{in_words(model)}, {row.cluster[0]} GPUs, {figure}"
    length = row.cluster.rpartition(", ")[2] if "tokens" in row.cluster else ""
    return f"{row.figure}, {length}" if length else row.figure


CLUSTERS = Result("clusters", "The papers' clusters", Row, draw)


def main() -> None:
    parser = modelled_arguments(__doc__, layers=1)
    parser.add_argument("--tokens", type=int, nargs=2, default=[130_048, 260_096], help="DSV's lengths at CP 4 and 8")
    parser.set_defaults(coarsen=4)
    options = parser.parse_args()
    rows = [*db_sp_rows(options), *dsv_rows(tuple(options.tokens))]
    CLUSTERS.publish(rows, options.out)


if __name__ == "__main__":
    main()
