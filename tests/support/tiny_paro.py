"""The mask files of configs/tiny-*-paro.yaml: block diagonals in token orders by head, as PAROAttention's masks are.

python -m tests.support.tiny_paro     # writes configs/masks/
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.masks.grid import AXIS_ORDERS
from dbsp_core.models.table import TINY_MODELS
from dbsp_core.utils.yaml_file import shipped_configs

GRIDS = {
    "wan": BlockGrid(9 * 7 * 13, 0, 32, 32, (9, 7, 13)),
    "cogvideox": BlockGrid(226 + 3 * 6 * 10, 226, 16, 16, (3, 6, 10)),
}
GROUPS = "1-3,4-"  # steps; step 0 is dense


def layer_mask(grid: BlockGrid, heads: int, layer: int, group: int) -> BlockMask:
    """Returns diagonals of another width and token order for each head; those of later steps are narrower."""
    distance = np.abs(np.arange(grid.nq)[:, None] - np.arange(grid.nk))
    width = 1 + (5 * np.arange(heads) + 3 * layer) % 8 // (1 + group)
    orders = tuple(AXIS_ORDERS[(head + layer) % 6] for head in range(heads))
    return BlockMask(distance <= width[:, None, None], grid.with_orders(orders))


def write(folder: Path) -> None:
    """Writes a file for each model."""
    for model, grid in GRIDS.items():
        layers, heads = TINY_MODELS[model].sizes[:2]
        masks = [[layer_mask(grid, heads, layer, group) for layer in range(layers)] for group in range(2)]
        save_mask(folder / f"tiny-{model}-paro.safetensors", masks, groups=GROUPS, packed=True)


if __name__ == "__main__":
    write(shipped_configs() / "masks")
