"""Density and imbalance of masks that sources predict from the same queries and keys: the small trained model's.

One dense video keeps the queries and keys of some denoising steps, of every layer, for the pass with the caption. Each
source predicts masks from them, which are planned for 8 GPUs, contiguously as plain Ulysses or Ring would, and by
planner `dbsp`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dbsp_core import make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.sources import LocalQK, MaskRequest
from scripts.reproduce.common import RESULTS, write_csv
from scripts.training.trained_model.prediction import BLOCK, Kept, run_model
from scripts.training.trained_model.small_model import PROMPTS, load_pipeline

THW = (9, 9, 15)
LABEL = "counted on masks of the small trained model"
SOURCES = (
    *({"source": "sparge", "cdf": cdf, "similarity": -1.0} for cdf in (0.3, 0.85)),
    {"source": "sparge", "topk": 0.3, "similarity": -1.0},
    *({"source": "sol", "tau": tau} for tau in (2.0, 1.0, 0.5, 0.0)),
    {"source": "sol", "tau": 1.0, "thresh_type": "exact"},
    {"source": "vsa", "sparsity": 0.7, "tile": [2, 2, 4]},
)


@dataclass(frozen=True)
class Row:
    """Means over masks, and ρ_s at most. before: contiguous; after: planner dbsp on its striped layout"""

    source: str
    strategy: str
    density: float
    rho_before: float
    rho_before_max: float
    rho_after: float
    rho_after_max: float
    masks: int
    label: str = LABEL


def rows_of(kept: Kept, strategies: list[str]) -> Iterator[Row]:
    for settings in SOURCES:
        source = DbspConfig.load({"mask": {**settings, "block_q": BLOCK, "block_k": BLOCK}}).mask
        masks = []
        for (step, layer), (q, k, scale) in sorted(kept.tensors.items()):
            masks.append(
                source.mask(MaskRequest(layer, len(q), THW, step=step), LocalQK.alone(q[None], k[None], scale))
            )
        name = ", ".join(f"{key} {value}" for key, value in settings.items() if key not in ("similarity", "tile"))
        for strategy in strategies:
            found = []
            for planner, home in (("contiguous", "contiguous"), ("dbsp", "striped")):
                layout = SequenceLayout.named(home, masks[0].grid, Strategy.parse(strategy))
                found.append([make_plan(mask, strategy, planner, layout=layout).rho for mask in masks])
            numbers = (value for rho in found for value in (float(np.mean(rho)), max(rho)))
            yield Row(name, strategy, float(np.mean([mask.density for mask in masks])), *numbers, len(masks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--steps", type=int, nargs="+", default=[1, 3, 5], help="denoising steps that are kept, of six"
    )
    parser.add_argument("--strategies", nargs="+", default=["U8R1", "U4R2", "U1R8"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV")
    options = parser.parse_args()
    kept = Kept(tuple(options.steps))
    with torch.no_grad():
        run_model(load_pipeline(), kept, PROMPTS[0], seed=0)
        for record in write_csv("source-balance", list(rows_of(kept, options.strategies)), options.out):
            print(record)


if __name__ == "__main__":
    main()
