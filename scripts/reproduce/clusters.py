"""The paper's two servers (§6), modelled: speed-up of planner dbsp over plain Ulysses and Ring, on a800 and h800."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from dbsp_core.cost.machine import load_hardware
from dbsp_core.cost.prediction import candidates
from scripts.reproduce.authors.fit import in_scripts
from scripts.reproduce.authors.measured import DBSP
from scripts.reproduce.authors.runs import as_run
from scripts.reproduce.modelled import (
    MODELLED,
    PAPER_ATTENTION,
    PAPER_END_TO_END,
    RunConfig,
    model_masks,
    modelled_arguments,
    video,
)
from scripts.results.result import print_table, write_csv


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


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for name in ("a800", "h800"):
        for (preset, gpus), (low, high) in PAPER_END_TO_END.items():
            masks, model = model_masks(preset, options), as_run(preset)
            hardware = in_scripts(load_hardware(name).with_kernel("sparge"), DBSP, preset)
            cluster = f"{gpus} × {name}"
            # 1. Of every strategy: contiguous plans' time over planner dbsp's.
            speedups, attention_speedups = [], {}
            for strategy in candidates(gpus, masks[0].grid):
                base, ours = (
                    video(RunConfig(strategy, planner), masks, model, hardware) for planner in ("contiguous", "dbsp")
                )
                speedups.append(base.end_to_end_s / ours.end_to_end_s)
                attention_speedups[str(strategy)] = base.attention_s / ours.attention_s
            # 2. Next to the paper's.
            mean = "theirs: least and largest mean, machines together"
            what = f"{preset}, end to end"
            yield Row("db-SP §6.2", what, cluster, f"{low}–{high}", min(speedups), max(speedups), mean)
            for (name_of_strategy, world), theirs in PAPER_ATTENTION.items():
                if world == gpus:
                    speedup, what = (
                        attention_speedups[name_of_strategy],
                        f"{preset}, attention over {name_of_strategy}",
                    )
                    mean = "mean over models and machines"
                    yield Row("db-SP §6.2", what, cluster, str(theirs), speedup, speedup, mean)


def main() -> None:
    parser = modelled_arguments(__doc__, layers=0)
    parser.set_defaults(coarsen=4)
    options = parser.parse_args()
    print_table("The paper's clusters", write_csv("clusters", list(measure(options)), options.out))


if __name__ == "__main__":
    main()
