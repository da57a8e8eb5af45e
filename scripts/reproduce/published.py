"""Published times of dense sequence parallelism and the latency model's: how many times as fast on how many GPUs.

`data/published.csv` has every table of models that `dbsp plan` knows, on machines of configs/hardware, that we found:
who published it, and each row as printed. Nothing is fitted to them, but the H20's one rate to the first row of its
first table. Each way of xDiT's is modelled with dense attention, plain Ulysses and Ring, and CFG passes on two
halves of the GPUs where `halves` is 2; CogVideoX1.5 at its real size, not the paper's.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dbsp_cli.modelled import MODELLED_ONLY, linear_flops, passes
from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import load_hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from scripts.reproduce.lockstep import nodes_of, plan_ring, predict_ring
from scripts.results.result import Result, arguments

TABLES = Path(__file__).parent / "data" / "published.csv"
BLOCK = 256


@dataclass(frozen=True)
class Row:
    """One row of a published table.

    Attributes:
        strategy: On the GPUs of one CFG pass, of which there are `halves` at the same time.
        unit: "video", "steps" (all, without decoding) or "step".
        error: Modelled over measured, less one.
        linear, modelled_linear: Share of linear scaling: one GPU's time over this one and over the number of GPUs.
        beyond_ns: What an attention takes beyond the model on these GPUs and not on one, for each token and head.
    """

    table: str
    model: str
    machine: str
    video: str
    gpus: int
    strategy: str
    halves: int
    unit: str
    measured_s: float
    modelled_s: float
    error: float
    linear: float
    modelled_linear: float
    beyond_ns: float
    label: str = "published by others; modelled"


def measure() -> Iterator[Row]:
    with TABLES.open(newline="", encoding="utf-8") as file:
        records = list(csv.DictReader(file))
    for _, table in itertools.groupby(records, lambda record: (record["table"], record["machine"], record["video"])):
        alone: tuple[float, float] | None = None
        for record in table:
            gpus, halves, measured = int(record["gpus"]), int(record["halves"]), float(record["measured_s"])
            spec = _of_size(record["model"], record["video"])
            modelled, attentions = _seconds(spec, record["machine"], record["strategy"], gpus, halves, record["unit"])
            alone = alone or (measured, modelled)
            scaled = measured - alone[0] / gpus, modelled - alone[1] / gpus
            yield Row(
                *(record[key] for key in ("table", "model", "machine", "video")),
                gpus,
                record["strategy"],
                halves,
                record["unit"],
                measured,
                modelled,
                modelled / measured - 1,
                alone[0] / measured / gpus,
                alone[1] / modelled / gpus,
                (scaled[0] - scaled[1]) / attentions / (spec.tokens * spec.heads) * 1e9,
            )


def _of_size(name: str, video: str) -> ModelSpec:
    """A model with a video of FRAMESxHEIGHTxWIDTH."""
    spec = (MODEL_SPECS | MODELLED_ONLY)[name]
    frames, height, width = (int(part) for part in video.split("x"))
    return replace(spec, video=replace(spec.video, num_frames=frames, height=height, width=width), paper_thw=None)


def _seconds(spec: ModelSpec, machine: str, strategy: str, gpus: int, halves: int, unit: str) -> tuple[float, int]:
    """Modelled seconds of what a row says, and how many attentions one GPU computes in it."""
    hardware = load_hardware(machine)
    plan = plan_ring(BlockMask.dense(spec.heads, BlockGrid.uniform(spec.tokens, BLOCK)), Strategy.parse(strategy))
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    prediction = predict_ring(plan, shape, hardware, nodes_of(hardware, plan.strategy.world))
    attention_s = prediction.total_s - (prediction.pack_s if plan.strategy.world == 1 else 0)  # one GPU packs nothing
    one_pass_s = spec.layers * attention_s + linear_flops(spec) * halves / gpus / hardware.constants.linear_flops_per_s
    count = passes(spec) // halves
    if unit == "step":
        count //= spec.video.steps or 1
    return count * one_pass_s + (hardware.constants.serial_s if unit == "video" else 0), count * spec.layers


if __name__ == "__main__":
    Result("published", "Published times and modelled ones", Row).run(arguments(__doc__), lambda _: measure())
