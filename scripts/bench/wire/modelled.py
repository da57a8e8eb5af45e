"""Modelled: what int8 on the wire saves of attention's time, by machine, nodes and strategy, for Wan2.1-14B at 720p.

    python -m scripts.bench.wire.modelled [--out docs/results]

Each strategy with the plan that is fastest in either precision; constants are the shipped machines'.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dbsp_cli.commands.simulate import masks_for
from dbsp_cli.simulate import MODELLED, SimulationResult, simulate
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.models.lookup import require_model
from dbsp_core.planning.wire_format import WIRE_FORMATS
from scripts.results.result import FOLDER, write_csv

MODEL_NAME, NODE = "wan2.1-t2v-14b", 8
SETTINGS = (
    *((machine, 1, None) for machine in ("a800", "h800", "h100", "h200")),
    ("h200", 2, 50.0), ("h200", 2, 20.0), ("a800", 2, 20.0),
)  # fmt: skip
"""Machine, nodes, and GB/s of each GPU between them."""


@dataclass(frozen=True)
class Row:
    """Seconds of a video's attention, and of the exchanges in it, in the model's precision and with int8; saved: share
    of attention's time"""

    hardware: str
    nodes: int
    gb_per_s: str
    strategy: str
    attention_s: float
    int8_attention_s: float
    exchange_s: float
    int8_exchange_s: float
    saved: float
    fastest: str
    label: str = MODELLED


def main() -> None:
    """Prints and writes the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    args = parser.parse_args()
    rows = [row for setting in SETTINGS for row in rows_of(*setting)]
    for row in rows:
        nodes = f"{row.nodes} of {NODE}" + (f" at {row.gb_per_s} GB/s" if row.gb_per_s else "")
        times = f"{row.attention_s:7.1f} → {row.int8_attention_s:6.1f} s, saves {row.saved:6.1%}"
        print(f"{row.hardware:5s} {nodes:16s} {row.strategy:6s} attention {times}   {row.fastest}")
    write_csv("int8-modelled", rows, args.out)


def rows_of(machine: str, nodes: int, gb_per_s: float | None) -> Iterator[Row]:
    """One for each strategy."""
    model, hardware = require_model(MODEL_NAME), _with_network(load_hardware(machine), gb_per_s)
    masks = masks_for(model, None, 1)
    found = simulate(model, masks, hardware, [nodes * NODE], ["dbsp"], node_size=NODE, precisions=tuple(WIRE_FORMATS))
    least = {name: min(_times(found, name).items(), key=lambda one: one[1].attention_s)[0] for name in WIRE_FORMATS}
    for strategy, whole in _times(found, "model").items():
        rounded = _times(found, "int8")[strategy]
        yield Row(
            machine,
            nodes,
            "" if gb_per_s is None else f"{gb_per_s:g}",
            strategy,
            whole.attention_s,
            rounded.attention_s,
            whole.exchange_s,
            rounded.exchange_s,
            1 - rounded.attention_s / whole.attention_s,
            ", ".join(name for name, best in least.items() if best == strategy),
        )


def _times(found: list[SimulationResult], precision: str) -> dict[str, SimulationResult]:
    return {one.strategy: one for one in found if one.precision == precision}


def _with_network(hardware: Hardware, gb_per_s: float | None) -> Hardware:
    if gb_per_s is None:
        return hardware
    latency = hardware.constants.network_latency_s or 3e-5
    constants = replace(hardware.constants, network_bytes_per_s=gb_per_s * 1e9, network_latency_s=latency)
    return replace(hardware, constants=constants, sources={**hardware.sources, "network_bytes_per_s": "assumed"})


if __name__ == "__main__":
    main()
