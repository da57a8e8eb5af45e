"""Time to share sequences out over bags, on one core: 128 sequences over 32 ranks, and larger clusters.

Processor time, as other programs may share the machine.

python -m scripts.bench.sequences.sharing                  milliseconds (least, median, most) and WIR of many draws
python -m scripts.bench.sequences.sharing --json > FILE    the same numbers for a program
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np

from dbsp_core.cost.machine import load_hardware
from dbsp_core.cost.sequence_cost import sequence_cost
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import plan_sequences
from scripts.reproduce.knapformer.drawing import StreamAssumptions, draw, parse_streams
from scripts.reproduce.knapformer.shared import FLUX
from scripts.results.result import print_table

CASES = {
    "mixed resolutions": ("g16b4i256,g4b7i512,g4b7i1024,g8b1i2048", 32),
    "images and videos": (
        "g8b6i256,g2b8i512,g2b5i1024,g4b1i2048,g1b15i256f4s0,g3b5i512f4s0,g8b2i256f85,g4b1i512f85",
        32,
    ),
    "low resolution": ("g32b32i256", 32),
    "mixed resolutions, 128 GPUs": ("g16b4i256,g4b7i512,g4b7i1024,g8b1i2048", 128),
}
"""By name: streams and GPUs. The first two have 128 and 127 sequences."""
BLOCK = 64


def measure(repeats: int) -> Iterator[dict[str, object]]:
    cost = sequence_cost(FLUX, load_hardware("h200"), BLOCK, BLOCK)
    for name, (codes, world) in CASES.items():
        for bags in ("g1", "g4", "g8"):
            topology = BagTopology.parse(f"{bags}n{world // int(bags[1:])}", world)
            times, wirs, count = [], [], 0
            for seed in range(repeats):
                drawn = draw(parse_streams(codes), world, seed, StreamAssumptions())
                tokens, count = drawn.tokens, len(drawn)
                picoseconds = cost.picoseconds(tokens, FLUX.heads * (-(-tokens // BLOCK)) ** 2)
                start = time.process_time()
                plan = plan_sequences(picoseconds, tokens, drawn.loader, topology)
                times.append((time.process_time() - start) * 1e3)
                load = np.bincount(plan.bag, picoseconds, len(topology.ranks)) / topology.ranks
                wirs.append(float(load.max() / load.min()))
            yield {
                "streams": name,
                "sequences": count,
                "gpus": world,
                "bags": str(topology),
                "least_ms": min(times),
                "median_ms": float(np.median(times)),
                "most_ms": max(times),
                "worst_wir": max(wirs),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="draws of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    rows = list(measure(options.repeats))
    label = "measured processor time on one core, planning alone"
    if options.json:
        print(json.dumps({"label": label, "repeats": options.repeats, "rows": rows}))
    else:
        print_table(label, rows)


if __name__ == "__main__":
    main()
