"""Density, error and imbalance of masks that sources predict from the same queries and keys of the trained model.

One dense video keeps the queries, keys and values of some denoising steps, of every layer, for the pass with the
caption. Each source predicts masks from them. Attention under a mask is compared with dense attention; and the mask is
planned for 8 GPUs, contiguously as plain Ulysses or Ring would, and by planner `dbsp`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core import BlockMask, make_plan
from dbsp_core.config.config import DbspConfig
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.sources import LocalQK, MaskRequest
from dbsp_diffusers.reference import masked_attention
from scripts.results.result import FOLDER, write_csv
from scripts.training.trained_model.prediction import BLOCK, Kept, run_model
from scripts.training.trained_model.small_model import PROMPTS, load_pipeline

THW = (9, 9, 15)
LABEL = "measured and counted on attentions of the small trained model"
SPARGE, SOL = {"source": "sparge", "similarity": -1.0}, {"source": "sol"}
SOURCES = (
    *({**SPARGE, "cdf": cdf} for cdf in (0.3, 0.6, 0.85)),
    *({**SPARGE, "topk": topk} for topk in (0.15, 0.3)),
    *({**SOL, "tau": tau} for tau in (2.0, 1.0, 0.5, 0.0)),
    {**SOL, "tau": 1.0, "thresh_type": "exact"},
    {"source": "vsa", "sparsity": 0.7, "tile": [2, 2, 4]},
)


@dataclass
class KeptValues(Kept):
    """Keeps values too."""

    values: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        mask = super().mask(request, tokens)
        if (request.step, request.layer) in self.tensors and request.cfg_branch == 0 and tokens.v is not None:
            self.values[request.step, request.layer] = tokens.v[0].clone()
        return mask


@dataclass(frozen=True)
class Row:
    """Means over masks, and ρ_s at most.

    error: Σ|sparse − dense| / Σ|dense| of attention's output;  before: contiguous;  after: planner dbsp on its
    striped layout
    """

    source: str
    strategy: str
    density: float
    error: float
    rho_before: float
    rho_before_max: float
    rho_after: float
    rho_after_max: float
    masks: int
    label: str = LABEL


def rows_of(kept: KeptValues, strategies: list[str]) -> Iterator[Row]:
    dense = {key: F.scaled_dot_product_attention(*_of_one(kept, key)) for key in kept.tensors}
    for settings in SOURCES:
        source = DbspConfig.load({"mask": {**settings, "block_q": BLOCK, "block_k": BLOCK}}).mask
        masks, errors = [], []
        for step, layer in sorted(kept.tensors):
            q, k, v = _of_one(kept, (step, layer))
            masks.append(source.mask(MaskRequest(layer, q.shape[1], THW, step=step), LocalQK.alone(q, k)))
            apart = masked_attention(q, k, v, masks[-1]) - dense[step, layer]
            errors.append(float(apart.abs().sum() / dense[step, layer].abs().sum()))
        said = (f"{key} {value}" for key, value in settings.items() if key not in ("source", "similarity", "tile"))
        name = ", ".join([settings["source"], *said])
        for strategy in strategies:
            found = []
            for planner, home in (("contiguous", "contiguous"), ("dbsp", "striped")):
                layout = SequenceLayout.named(home, masks[0].grid, Strategy.parse(strategy))
                found.append([make_plan(mask, strategy, planner, layout=layout).rho for mask in masks])
            numbers = (value for rho in found for value in (float(np.mean(rho)), max(rho)))
            density = float(np.mean([mask.density for mask in masks]))
            yield Row(name, strategy, density, float(np.mean(errors)), *numbers, len(masks))


def _of_one(kept: KeptValues, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one attention, [1, H, tokens, D]."""
    q, k, _ = kept.tensors[key]
    return q[None], k[None], kept.values[key][None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4], help="denoising steps that are kept, of six")
    parser.add_argument("--strategies", nargs="+", default=["U8R1", "U1R8"])
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    kept = KeptValues(tuple(options.steps))
    with torch.no_grad():
        run_model(load_pipeline(), kept, PROMPTS[0], seed=0)
        for record in write_csv("source-balance", list(rows_of(kept, options.strategies)), options.out):
            print(record)


if __name__ == "__main__":
    main()
