"""docs/pictures/masks-info.png and docs/balance.png: what db-SP draws of masks and of plans, here of recorded ones.

The masks are those that the small trained model ran under, in the mask file that ships with the tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dbsp_cli.mask_tools.info import MaskSeries, examine_masks, mask_picture
from dbsp_core import SequenceLayout, Strategy, make_plan
from dbsp_core.reports.page import balance_picture

DOCS = Path(__file__).resolve().parents[1]
RECORDED = DOCS.parent / "tests" / "data" / "learned-masks.safetensors"
STRATEGY = "U2R2"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for both PNGs; default: where the pages look for them")
    out: Path | None = parser.parse_args().out
    series = MaskSeries.read(RECORDED)
    masks = {layer: series.get(series.steps[-1], layer) for layer in series.layers}
    layout = SequenceLayout.named("striped", masks[series.layers[0]].grid, Strategy.parse(STRATEGY))
    plans = {layer: make_plan(mask, STRATEGY, layout=layout) for layer, mask in masks.items()}
    pictures = {
        (out or DOCS / "pictures") / "masks-info.png": mask_picture(RECORDED.name, series, examine_masks(series)),
        (out or DOCS) / "balance.png": balance_picture(plans),
    }
    for path, content in pictures.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
