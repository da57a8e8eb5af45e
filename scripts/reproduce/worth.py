"""Gain of sparse attention over dense, modelled by tokens and density, and SubBlock's published.

MiniMax-H3 on 8 GPUs (U8R1), all 49 passes without decoding, the first 10 dense as SubBlock ships. Lines are db-SP with
its kernel `triton`, and with SubBlock's, which keeps 0.72 of the dense kernel's rate on an H200. Dots are the gains
that were published of SubBlock in SGLang (density 152 of 590 blocks), to which nothing is fitted; the engine's speed
is fitted to one published dense time (`scripts.reproduce.published`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from matplotlib.figure import Figure

from dbsp_cli.commands.plan import linear_flops
from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.reports.style import INK
from scripts.reproduce.lockstep import nodes_of, plan_ring, predict_ring
from scripts.reproduce.published import BLOCK, TABLES, read_records, speeds
from scripts.results.colours import MASKS
from scripts.results.figures import legend_below, panels
from scripts.results.result import Result, Row, arguments

SPEC = MODEL_SPECS["minimax-h3"]
ENGINES = {"b200": "sglang", "h200": "sglang", "h20": "vllm-omni"}
"""Machines, and the engine whose speed is taken there: SGLang's on the H20 would exceed its tensor cores' rate."""
TOKENS = tuple(int(tokens) for tokens in np.geomspace(8_000, 256_000, 11).round(-2))
DENSITIES = (0.1, 0.25, 0.5, 0.75)
SUBBLOCK, SUBBLOCK_OF_DENSE = 152 / 590, 0.72
DENSE_STEPS, STEPS = 10, 49
PUBLISHED = "published by others; modelled"


def gain_of(
    machine: str, gpus: int, tokens: int, density: float, speed: float, of_dense: float | None, unit: str = "steps"
) -> float:
    """Returns dense over sparse seconds. of_dense: the kernel's rate over the dense one's; None: `triton`'s"""
    hardware = load_hardware(machine).with_kernel("triton")
    dense, known = hardware.with_dense_attention(), hardware.at_blocks(64, 64)
    dense_rate = dense.constants.flops_per_s
    rate = known.flops_per_s if of_dense is None else of_dense * dense_rate
    predict_s = (known.predict_s or 0.0) * tokens * SPEC.heads / gpus if of_dense is None else 0.0
    sparse = replace(dense, constants=replace(dense.constants, flops_per_s=rate / density))
    grid = BlockGrid.uniform(tokens, BLOCK)
    plan = plan_ring(BlockMask.dense(SPEC.heads, grid), Strategy(gpus, 1))

    def attention_s(hardware: Hardware) -> float:
        shape = AttentionShape(1, SPEC.heads, SPEC.head_dim)
        return predict_ring(plan, shape, hardware, nodes_of(hardware, gpus)).total_s

    other_s = linear_flops(SPEC) * tokens / SPEC.tokens / gpus / (speed * known.linear_flops_per_s)
    dense_s, sparse_s = SPEC.layers * attention_s(dense), SPEC.layers * (attention_s(sparse) + predict_s)
    other_s += known.serial_s / STEPS if unit == "video" else 0.0
    share = DENSE_STEPS / STEPS
    return (dense_s + other_s) / (share * dense_s + (1 - share) * sparse_s + other_s)


def row(
    machine: str, gpus: int, tokens: int, of_dense: float | None, density: float, speed: float, unit: str = "steps"
) -> Row:
    """The gain of the whole video but its decoding, without one that others measured."""
    return Row(
        machine=machine,
        gpus=gpus,
        tokens=tokens,
        kernel="triton" if of_dense is None else "SubBlock's",
        density=density,
        gain=gain_of(machine, gpus, tokens, density, speed, of_dense, unit),
        published="",
        table="",
        label="modelled",
    )


def rows() -> Iterator[Row]:
    of_engines = speeds(read_records())
    for machine, engine in ENGINES.items():
        speed = of_engines[engine]
        for tokens in TOKENS:
            for density in DENSITIES:
                yield row(machine, 8, tokens, None, density, speed)
            yield row(machine, 8, tokens, SUBBLOCK_OF_DENSE, SUBBLOCK, speed)
    with TABLES.with_name("subblock.csv").open(newline="", encoding="utf-8") as file:
        for record in csv.DictReader(file):
            machine, gpus, tokens = record["machine"], int(record["gpus"]), int(record["tokens"])
            speed = of_engines[ENGINES[machine]]
            found = row(machine, gpus, tokens, SUBBLOCK_OF_DENSE, SUBBLOCK, speed, record["unit"])
            found.published, found.table, found.label = float(record["gain"]), record["table"], PUBLISHED
            yield found


def draw(found: list[Row]) -> Figure:
    figure, axes = panels(
        "Where does sparse attention help?",
        "MiniMax-H3 on 8 GPUs: dense over sparse seconds, modelled, 10 of 49 passes dense; dots: published",
        columns=len(ENGINES),
        sharey=True,
    )
    most = max(row.gain for row in found)
    shades = dict(zip(DENSITIES, ("#17456f", "#2a6db0", "#79a7d3", "#bcd3ea"), strict=True))
    for axis, machine in zip(axes[0], ENGINES, strict=True):
        here = [row for row in found if row.machine == machine]
        lines = {f"db-SP, density {d:g}": (("triton", d), {"color": colour}) for d, colour in shades.items()}
        lines["SubBlock's kernel, 0.26"] = (("SubBlock's", SUBBLOCK), {"color": MASKS["subblock"], "ls": "--"})
        for label, ((kernel, density), style) in lines.items():
            line = [r for r in here if not r.published and r.kernel == kernel and abs(r.density - density) < 1e-3]
            axis.plot([row.tokens for row in line], [row.gain for row in line], label=label, **style)
        dots = [row for row in here if row.published]
        style = {"color": MASKS["subblock"], "zorder": 3, "edgecolor": "white"}
        axis.scatter(
            [row.tokens for row in dots], [float(row.published) for row in dots], label="SubBlock, published", **style
        )
        axis.axhline(1, color=INK, lw=0.8)
        ticks = (10_000, 30_000, 100_000, 250_000)
        axis.set(title=machine.upper(), xscale="log", xlabel="tokens", ylim=(0.6, 1.05 * most))
        axis.set_xticks(ticks, [f"{tick // 1000} k" for tick in ticks])
        axis.set_xticks([], minor=True)
    axes[0, 0].set_ylabel("times as fast as dense")
    legend_below(figure, axes[0], columns=3)
    return figure


WORTH = Result("worth", "Gain over dense attention", draw)


if __name__ == "__main__":
    WORTH.run(arguments(__doc__), lambda _: rows())
