"""Balance of SSTA's masks at HunyuanVideo-1.5's size, where heads that choose tiles of the window have half the work.

Counted, on drawn masks: no masks of the checkpoint are known. A head's rows find a share of their window's tiles among
their 32 largest scores; shares are equally spaced from 0 to 1 over the heads, in a drawn order.

    python -m scripts.bench.ssta_balance
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from dbsp_core import BlockMask, Strategy, make_plan
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.sources import MaskRequest, SstaSource
from dbsp_core.sources.ssta import Tiles

HEADS, THW, TOPK = 16, (31, 45, 80), 32


def drawn(text: int, seed: int) -> BlockMask:
    """Draws a mask of 121 frames at 720p."""
    source, rng = SstaSource(), np.random.default_rng(seed)
    grid = source.grid(MaskRequest(0, HEADS, THW, text))
    tiles = Tiles.of(grid, source.tile, source.window, torch.device("cpu"))
    near = tiles.near.numpy()[tiles.text :, tiles.text :]
    bits = np.ones((HEADS, tiles.grid.nq, tiles.grid.nk), dtype=bool)
    for head, share in enumerate(rng.permutation(np.linspace(0, 1, HEADS))):
        for row, window in enumerate(near):
            inside = rng.permutation(np.flatnonzero(window))[: round(share * window.sum())]
            outside = rng.permutation(np.flatnonzero(~window))[: TOPK - len(inside)]
            kept = np.isin(np.arange(len(near)), np.concatenate([inside, outside])) | window
            bits[head, tiles.text + row, tiles.text :] = kept
    by_tile = torch.from_numpy(bits)
    return BlockMask(by_tile[:, tiles.of_q][:, :, tiles.of_k], grid)


def main() -> None:
    """Prints ρ_s of plain sequence parallelism and of db-SP on 8 GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    for text in (0, 1000):
        masks = [drawn(text, seed) for seed in range(options.seeds)]
        print(f"{text} tokens of text, density {np.mean([mask.density for mask in masks]):.3f}")
        for name in ("U8R1", "U4R2", "U2R4", "U1R8"):
            strategy = Strategy.parse(name)
            rho = {}
            for planner, layout in (("contiguous", "contiguous"), ("dbsp", "striped")):
                layouts = [SequenceLayout.named(layout, mask.grid, strategy) for mask in masks]
                each = zip(masks, layouts, strict=True)
                rho[planner] = np.mean([make_plan(mask, strategy, planner, layout=where).rho for mask, where in each])
            print(f"  {name}: {rho['contiguous']:.3f} → {rho['dbsp']:.3f}")


if __name__ == "__main__":
    main()
