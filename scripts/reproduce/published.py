"""Published times of dense sequence parallelism and the latency model's, with constants of each engine.

`data/published.csv` has the dense tables without tensor parallelism that we found, of models that `dbsp plan` knows
and machines of configs/hardware: who published it, and each row as printed. Of each engine, the rate of all but
attention is fitted to one row, as a multiple of the machine's; the others are held out. Dense attention has the rate
of the engine's kernel. Strategies are modelled as plain Ulysses and Ring, and CFG passes on two halves of the GPUs
where `halves` is 2; CogVideoX1.5 at its real size, not the paper's.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dbsp_cli.commands.plan import linear_flops, passes, sized
from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from scripts.reproduce.lockstep import nodes_of, plan_ring, predict_ring
from scripts.results.result import Result, Row, arguments

TABLES = Path(__file__).parent / "data" / "published.csv"
BLOCK = 256
FLASH_2 = {
    ("h100", 128): 3.70e14,  # FlashAttention-3's paper, Fig. 5: at 16k tokens, forward
    ("h100", 64): 3.24e14,
    ("h200", 128): 3.587e14,  # gpu-h200.csv, median of three at density 1.0
    ("h20", 128): 8.9e13,  # as all else in h20.yaml; at 2k tokens 8.4e13 (Dao-AILab/flash-attention#1310)
    ("h20", 64): 8.9e13,
    ("a800", 64): 1.829e14,  # as the db-SP authors' dense attention at head size 128
}
"""FLOP/s of FlashAttention 2, which torch runs on Hopper unless it is told to run cuDNN, by machine and head size."""
WITH_FLASH_2 = ("diffusers", "xdit")
"""Engines that run it; the others run the fastest dense kernel of the machine, `dense_flops_per_s`."""


@dataclass(frozen=True)
class Parts:
    """Modelled seconds of what a row says, on the machine as it is."""

    attention_s: float
    linear_s: float
    serial_s: float
    attentions: int  # That one GPU computes in it

    def seconds(self, speed: float) -> float:
        """Returns their sum, with everything but attention `speed` times as fast."""
        return self.attention_s + self.linear_s / speed + self.serial_s

    def speed(self, seconds: float) -> float:
        """Returns the speed at which they sum up to so many seconds."""
        return self.linear_s / (seconds - self.attention_s - self.serial_s)


def read_records() -> list[dict[str, str]]:
    with TABLES.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def speeds(records: list[dict[str, str]]) -> dict[str, float]:
    """Returns each engine's rate of all but attention over the machine's, by the row that it is fitted to."""
    fitted = [record for record in records if record["fitted"]]
    return {record["engine"]: _parts(record).speed(float(record["measured_s"])) for record in fitted}


def measure() -> Iterator[Row]:
    """scaling: share of linear scaling from the table's first row on.

    beyond_ns: what an attention takes beyond the model and not in the first row, for each token and head.
    """
    records = read_records()
    of_engines = speeds(records)
    for _, table in itertools.groupby(records, lambda record: (record["table"], record["machine"], record["video"])):
        first: tuple[float, float] | None = None
        for record in table:
            gpus, measured, parts = int(record["gpus"]), float(record["measured_s"]), _parts(record)
            speed, spec = of_engines[record["engine"]], _spec(record)
            modelled = parts.seconds(speed)
            first = first or (measured * gpus, modelled * gpus)
            slower_s = (measured - first[0] / gpus) - (modelled - first[1] / gpus)
            yield Row(
                **{key: record[key] for key in ("table", "engine", "model", "machine", "video")},
                gpus=gpus,
                strategy=record["strategy"],
                halves=int(record["halves"]),
                unit=record["unit"],  # "video", "steps" (all, without decoding) or "step"
                half="fitted" if record["fitted"] else "held out",
                speed=speed,
                measured_s=measured,
                modelled_s=modelled,
                error=modelled / measured - 1,
                scaling=first[0] / measured / gpus,
                modelled_scaling=first[1] / modelled / gpus,
                beyond_ns=slower_s / parts.attentions / (spec.tokens * spec.heads) * 1e9,
                label="published by others; modelled",
            )


def _spec(record: dict[str, str]) -> ModelSpec:
    """Returns the model with the row's video of FRAMESxHEIGHTxWIDTH."""
    frames, height, width = record["video"].split("x")
    return sized(MODEL_SPECS[record["model"]], f"{height}x{width}x{frames}")


def dense_machine(name: str, engine: str, head_dim: int) -> Hardware:
    """Returns a machine with the rate of an engine's dense attention."""
    hardware = load_hardware(name)
    if engine in WITH_FLASH_2:
        rate = FLASH_2[name, head_dim]
        hardware = replace(hardware, constants=replace(hardware.constants, dense_flops_per_s=rate))
    return hardware.with_dense_attention()


def _parts(record: dict[str, str]) -> Parts:
    spec, gpus, halves = _spec(record), int(record["gpus"]), int(record["halves"])
    hardware = dense_machine(record["machine"], record["engine"], spec.head_dim)
    strategy, known = Strategy.parse(record["strategy"]), hardware.constants
    plan = plan_ring(BlockMask.dense(spec.heads, BlockGrid.uniform(spec.tokens, BLOCK)), strategy)
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    prediction = predict_ring(plan, shape, hardware, nodes_of(hardware, strategy.world))
    attention_s = prediction.total_s - (prediction.pack_s if strategy.world == 1 else 0)  # one GPU packs nothing
    count = passes(spec) // halves
    if record["unit"] == "step":
        count //= spec.video.steps or 1
    return Parts(
        attention_s=count * spec.layers * attention_s,
        linear_s=count * linear_flops(spec) * halves / gpus / known.linear_flops_per_s,
        serial_s=known.serial_s if record["unit"] == "video" else 0.0,
        attentions=count * spec.layers,
    )


def summary(rows: list[Row]) -> Iterator[str]:
    for engine, of_engine in itertools.groupby(sorted(rows, key=lambda row: row.engine), lambda row: row.engine):
        found = list(of_engine)
        errors = sorted(abs(row.error) for row in found if row.half == "held out")
        held = f"{errors[len(errors) // 2]:.1%} median, {errors[-1]:.1%} worst" if errors else "nothing to compare"
        yield f"{engine}: speed {found[0].speed:.3f}; {len(errors)} held out: {held}"


if __name__ == "__main__":
    Result("published", "Published times and modelled ones").run(arguments(__doc__), lambda _: measure(), summary)
