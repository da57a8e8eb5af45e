"""Fits the presets: head_concentration to the Ulysses row of Table 1, then spread to the Ring row, drift to Fig. 11.

Prints what belongs into dbsp_core/sources/synthetic/source.py; writes nothing. Averages over all layers of four
seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from dbsp_core.sources.synthetic.source import PRESETS
from scripts.reproduce.common import FIG_11, TABLE_1, contiguous_rho
from scripts.reproduce.fig11 import PRESET as FIG_11_PRESET
from scripts.reproduce.fig11 import replans_and_rho

SEEDS = (0, 1, 2, 3)


def solve(target: float, low: float, high: float, value: Callable[[float], float], steps: int = 7) -> float:
    """x between low and high (on a logarithmic scale) where value(x), which falls or grows with x, meets target."""
    grows = value(high) > value(low)
    for _ in range(steps):
        middle = float(np.sqrt(low * high))
        if (value(middle) < target) == grows:
            low = middle
        else:
            high = middle
    return round(float(np.sqrt(low * high)), 3)


def mean_rho(preset: str, strategy: str, coarsen: int, **style: Any) -> float:
    """ρ_s of the contiguous plan, mean over all layers of all seeds."""
    values = []
    for seed in SEEDS:
        options = argparse.Namespace(layers=0, seed=seed, coarsen=coarsen)
        values += contiguous_rho(preset, [strategy], options, **style)[0]
    return float(np.mean(values))


def mean_replans(drift: float, **style: Any) -> float:
    """Replans of Fig. 11, mean over ten layers of each seed."""
    replans = []
    for seed in SEEDS:
        options = argparse.Namespace(layers=10, seed=seed, coarsen=1)
        replans.append(replans_and_rho(options, "paper", (FIG_11["threshold"],), drift=drift, **style)[0].replans)
    return float(np.mean(replans))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help=f"of {', '.join(PRESETS)}; none means all")
    presets = parser.parse_args().presets or list(PRESETS)
    paper = {(row.preset, row.strategy): row.rho for row in TABLE_1 if row.fitted}
    for preset in presets:
        # Ulysses looks at heads alone, whose counts are exact: blocks may be as coarse as one likes.
        fitted = {
            "head_concentration": solve(
                paper[preset, "U8R1"],
                0.4,
                10,
                lambda x, preset=preset: mean_rho(preset, "U8R1", 16, head_concentration=x, drift=0.0),
            )
        }
        if (preset, "U1R8") in paper:
            fitted["spread"] = solve(
                paper[preset, "U1R8"],
                0.1,
                2,
                lambda x, preset=preset, heads=dict(fitted): mean_rho(preset, "U1R8", 4, spread=x, **heads),
            )
        if preset == FIG_11_PRESET:
            fitted["drift"] = solve(
                FIG_11["replans"], 0.001, 0.1, lambda x, heads=dict(fitted): mean_replans(x, **heads)
            )
        print(preset, fitted, flush=True)


if __name__ == "__main__":
    main()
