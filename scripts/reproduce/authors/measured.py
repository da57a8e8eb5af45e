"""Measurements that the db-SP paper's authors published with it, as numbers (github.com/thu-nics/db-SP).

`fig8_bars.csv`: Fig. 8's bars of 8 and 4 GPUs, read off assets/results.png, to within 1.4 s. `fig10_attention_ms.csv`:
times of an attention in 50 steps, 40 layers and 4 strategies with balanced plans, Fig. 10's data (total_time_list_*.pt
at a0621a7; that they are its data follows from their means, which are the paper's 1.02 to 1.27; the machine is not
said). `fig9_points.csv`: Fig. 9's points (attention_speedup_*.csv of branch AE), two series for the ring.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dbsp_core import Strategy

DATA = Path(__file__).parent / "data"
STRATEGIES = tuple(Strategy.parse(name) for name in ("U8R1", "U4R2", "U2R4", "U1R8"))
BURST, DBSP, PARO, SPARGE = "BurstEngine", "db-SP", "PAROAttention", "SpargeAttn"
SEED = 20251128  # decides which half of Fig. 10's layers constants are fitted to; the day on which the paper appeared
FITTED_GPUS = 8  # number of GPUs of the bars that constants are fitted to; those of 4 GPUs are held out

DENSITIES = {
    ("wan2.1-t2v-14b", f"{PARO} 0.414"): 0.414,
    ("wan2.1-t2v-14b", f"{PARO} 0.683"): 0.683,
    ("cogvideox1.5-5b", f"{PARO} 0.414"): 0.442,
    ("cogvideox1.5-5b", f"{PARO} 0.683"): 0.683,
}
"""By model and method: shares of active blocks, as their code takes 0.414; CogVideoX's mask has 0.442."""

PROFILE = {
    "all_to_all_ms": {2: 1.6, 4: 3.0, 8: 3.6},
    "p2p_ms": {2: 9.0, 4: 4.5, 8: 2.3},
    "dense_ms": 80.0,
    "launch_ms": 0.5,
}
"""Eq. 4's constants for Wan2.1-14B (db-SP/selector.py of branch AE): by Ulysses degree, by ring degree, dense
attention on 8 GPUs, a launch."""

PASSES, REWARD = 1, 2  # forward passes a step (guidance 1; no video is decoded), and R_b, as in their run_wan_paro.py


@dataclass(frozen=True)
class Bar:
    """One bar of Fig. 8, seconds of a video."""

    gpus: int
    model: str
    machine: str
    method: str  # PAROAttention with its density, or SpargeAttn
    way: str  # a strategy with contiguous plans, BurstEngine, or db-SP
    end_to_end_s: float
    other_s: float | None  # all but attention; None where it could not be read

    @property
    def panel(self) -> tuple[int, str, str, str]:
        return (self.gpus, self.model, self.machine, self.method)

    @property
    def fitted(self) -> bool:
        """True if constants are fitted to it."""
        return self.gpus == FITTED_GPUS


def bars() -> tuple[Bar, ...]:
    return tuple(
        Bar(
            int(row["gpus"]),
            *(row[key] for key in ("model", "machine", "method", "way")),
            float(row["end_to_end_s"]),
            float(row["other_s"]) if row["other_s"] else None,
        )
        for row in _rows("fig8_bars")
    )


def attention_ms() -> np.ndarray:
    """float64[50 steps, 40 layers, 4 strategies], in the order of `STRATEGIES`."""
    values = [[float(row[str(strategy)]) for strategy in STRATEGIES] for row in _rows("fig10_attention_ms")]
    return np.array(values).reshape(50, 40, len(STRATEGIES))


def speedups(strategy: str) -> np.ndarray:
    """float64[points, 2]: ρ_s before over after balancing, and attention time before over after."""
    found = [row for row in _rows("fig9_points") if row["strategy"] == strategy]
    return np.array([[float(row["rho_ratio"]), float(row["attention_speedup"])] for row in found])


def fitted_half(count: int) -> np.ndarray:
    """bool[count]: to which of so many layers constants are fitted; the others are held out."""
    chosen = np.zeros(count, dtype=bool)
    chosen[np.random.default_rng(SEED).permutation(count)[: count // 2]] = True
    return chosen


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (DATA / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)
