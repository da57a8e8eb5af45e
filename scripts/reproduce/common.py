"""What the reproductions share: the paper's numbers, masks of a preset, and results as CSV, table and picture."""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display needed

from matplotlib import pyplot
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dbsp_core import BlockMask, Plan, make_plan
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.sources.synthetic.presets import PRESETS

STRATEGIES = ("U8R1", "U4R2", "U2R4", "U1R8")
MEASURED = "measured on synthetic masks"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@dataclass(frozen=True)
class PaperRow:
    """One row of Table 1. fitted: whether the preset was fitted to it, or it was held out."""

    preset: str
    strategy: str
    rho: float
    fitted: bool


TABLE_1 = (
    PaperRow("wan2.1-t2v-14b", "U8R1", 1.355, fitted=True),
    PaperRow("wan2.1-t2v-14b", "U1R8", 1.255, fitted=True),
    PaperRow("wan2.1-t2v-14b", "U4R2", 1.253, fitted=False),
    PaperRow("wan2.1-t2v-14b", "U2R4", 1.246, fitted=False),
    PaperRow("wan2.1-t2v-14b-sparge", "U8R1", 1.428, fitted=True),
    PaperRow("cogvideox1.5-5b", "U8R1", 1.447, fitted=True),
    PaperRow("cogvideox1.5-5b", "U1R8", 1.269, fitted=True),
    PaperRow("cogvideox1.5-5b", "U4R2", 1.201, fitted=False),
    PaperRow("cogvideox1.5-5b", "U2R4", 1.159, fitted=False),
    PaperRow("cogvideox1.5-5b-sparge", "U8R1", 1.513, fitted=True),
)

BALANCED = {
    "U8R1": ("≤ 1.1 (§4.2.1)", "1.025 mean, 1.05 max"),
    "U1R8": ("≤ 1.05 (§4.2.2)", "< 1.01 mean"),
    "U4R2": ("–", "< 1.03 mean"),
    "U2R4": ("–", "< 1.03 mean"),
}
"""ρ_s after balancing, as the paper's text and its slides state it."""

FIG_11 = {"threshold": 1.10, "steps": 50, "replans": 5}
"""§4.2.1: with P_s = 1.10, plans are made in 5 of 50 steps with Wan2.1-T2V-14B."""


def arguments(description: str, layers: int) -> argparse.ArgumentParser:
    """A parser with the options that all reproductions have. layers: how many layers by default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=partial(argparse.ArgumentDefaultsHelpFormatter, width=100)
    )
    parser.add_argument("--layers", type=int, default=layers, help="layers per model; 0 means all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks")
    parser.add_argument(
        "--coarsen", type=int, default=1, help="multiply block sizes: quicker, ρ_s moves by about 0.01"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV and the PNG")
    return parser


def preset_source(name: str, options: argparse.Namespace, **style: Any) -> SyntheticSource:
    """The preset's masks in the preset's own block sizes. style: keys to set differently."""
    preset = PRESETS[name]
    block_q, block_k = preset.block_q * options.coarsen, preset.block_k * options.coarsen
    return SyntheticSource(preset=name, seed=options.seed, block_q=block_q, block_k=block_k, **style)


def layer_count(name: str, options: argparse.Namespace) -> int:
    layers = PRESETS[name].model.layers
    return min(options.layers, layers) if options.layers > 0 else layers


def masks(name: str, options: argparse.Namespace, **style: Any) -> Iterator[BlockMask]:
    """The first mask of each of the model's first layers."""
    source, model = preset_source(name, options, **style), PRESETS[name].model
    for layer in range(layer_count(name, options)):
        yield source.mask(MaskRequest(layer, model.heads, model.thw, model.text_tokens))


def contiguous_rho(
    name: str, strategies: Iterable[str], options: argparse.Namespace, **style: Any
) -> list[list[float]]:
    """ρ_s of the contiguous plan by strategy and layer. It looks at nothing in a mask: one plan serves all layers."""
    plans: dict[str, Plan] = {}
    rho: dict[str, list[float]] = {strategy: [] for strategy in strategies}
    for mask in masks(name, options, **style):
        for strategy, values in rho.items():
            if strategy not in plans:
                plans[strategy] = make_plan(mask, strategy, "contiguous")
            values.append(plans[strategy].evaluate(mask, compare=False).rho)
    return list(rho.values())


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error over layers (0 for one layer)."""
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)


def publish(name: str, title: str, rows: list[Any], figure: Figure, out: Path) -> None:
    """Writes NAME.csv and NAME.png into `out` and prints the rows as a table.

    rows: dataclasses of one class, with a field `label` that says what is measured, modelled or fitted
    """
    records = write_csv(name, rows, out)
    figure.savefig(out / f"{name}.png", dpi=130)
    pyplot.close(figure)
    Console(width=None if sys.stdout.isatty() else 120).print(_table(title, records))
    Console(stderr=True).print(f"wrote {out / name}.csv and {out / name}.png")


def write_csv(name: str, rows: list[Any], out: Path) -> list[dict[str, Any]]:
    """Writes NAME.csv into `out`, and returns what it has. rows: dataclasses of one class"""
    out.mkdir(parents=True, exist_ok=True)
    records = [{key: _short(value) for key, value in asdict(row).items()} for row in rows]
    with (out / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, records[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return records


def _table(title: str, records: list[dict[str, Any]]) -> Table:
    """Columns for what differs between rows; what all rows share, their labels too, stands below."""
    shared = {key for key in records[0] if len(records) > 1 and len({str(record[key]) for record in records}) == 1}
    caption = "; ".join(f"{key}: {value}" for key, value in records[0].items() if key in shared)
    shown = [key for key in records[0] if key not in shared]
    table = Table(*shown, title=title, caption=caption, box=SIMPLE_HEAD)
    for record in records:
        table.add_row(*(str(record[key]) for key in shown))
    return table


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
