"""What db-SP costs in a serving engine: its steps against those of the engine's own dense attention, two CPU ranks.

Needs the engines' environments (`scripts/engines install ENGINE`). Three runs of one tiny random model take turns, a
step each: the engine's own attention, db-SP with dense masks, and with predicted ones. The time is measured, on CPUs;
collectives, copies and operations of a layer are counted. On GPUs db-SP's copies are Triton kernels, of which
`scripts.bench.steady_call` counts the launches.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.checks.engines.runs import PYTHON, Case
from scripts.checks.engines.turns import alternate, ratio
from scripts.results.result import Result, arguments

ENVIRONMENTS = Path(__file__).resolve().parents[2] / ".venv-engines"

SIZES = {"small": (3, 8, 12), "large": (8, 24, 24)}
"""Of the video, in tokens: in the small one the time is that of calls, in the large one that of attention."""
MASKS = {"engine": None, "dense": "dense", "sparge": "sparge:topk=0.25,block_q=64,block_k=64"}
HEADS = 4
MODELS = {"vllm_omni": ("wan", "h3"), "sglang": ("wan", "h3"), "lightx2v": ("wan",)}
STRATEGIES = {"U2R1": (2, 1)}


@dataclass(frozen=True)
class Row:
    """One engine's model at one size, with one attention.

    Attributes:
        attention: "engine", its own dense one; or db-SP's mask.
        steps_per_s: Median over turns, on two CPU ranks.
        times_engine: Median over turns of the step's time over that of the engine's own attention next to it.
        collectives, copies, operations: Of a layer, block and all, as torch is asked for them.
    """

    engine: str
    model: str
    strategy: str
    tokens: int
    attention: str
    steps_per_s: float
    times_engine: float
    collectives: float
    copies: float
    operations: float


def rows_of(engine: str, strategy: str, turns: int) -> Iterator[Row]:
    """Yields one row for each attention at each size of each model."""
    shapes = [(model, thw) for model in MODELS[engine] for thw in SIZES.values()]
    runs = [[Case(HEADS, (thw,), mask, model=model) for model, thw in shapes] for mask in MASKS.values()]
    found = alternate(engine, *STRATEGIES[strategy], runs, turns)
    for number, (model, thw) in enumerate(shapes):
        for attention, cases in zip(MASKS, found, strict=True):
            of_case, of_engine = cases[number], found[0][number]
            counts = {what: of_case["counts"].get(what, 0.0) for what in ("collectives", "copies", "operations")}
            speed, times = 1 / statistics.median(of_case["seconds"]), ratio(of_case, of_engine)
            yield Row(engine, model, strategy, math.prod(thw), attention, speed, times, **counts)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    for engine in options.engines or MODELS:
        os.environ[PYTHON] = str(ENVIRONMENTS / engine.replace("_", "-") / "bin" / "python")
        for strategy in STRATEGIES:
            yield from rows_of(engine, strategy, options.turns)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--turns", type=int, default=15, help="steps of each that are measured; the median counts")
    Result("engine-steps", "Steps of serving engines, without db-SP and with it", Row).run(parser, measure)


if __name__ == "__main__":
    main()
