"""Numbers of the paper that several reproductions need, masks of a preset, and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dbsp_core import BlockMask
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from dbsp_core.sources import MaskRequest, SyntheticSource
from scripts.results import result as results

STRATEGIES = ("U8R1", "U4R2", "U2R4", "U1R8")
MEASURED = "measured on synthetic masks"


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


def arguments(description: str | None, layers: int) -> argparse.ArgumentParser:
    """A parser with the options of programs that take masks of presets. layers: how many layers by default."""
    parser = results.arguments(description)
    parser.add_argument("--layers", type=int, default=layers, help="layers per model; 0 means all")
    parser.add_argument("--seed", type=int, default=0, help="seed of the masks")
    parser.add_argument(
        "--coarsen", type=int, default=1, help="multiply block sizes: quicker, ρ_s moves by about 0.01"
    )
    return parser


def preset_model(name: str) -> ModelSpec:
    return MODEL_SPECS[name.removesuffix("-sparge")]


def preset_blocks(name: str, coarsen: int = 1) -> dict[str, int]:
    """Returns the block sizes that a preset was fitted for: SpargeAttn has 128 queries and 64 keys in a block."""
    return {"block_q": (128 if name.endswith("-sparge") else 64) * coarsen, "block_k": 64 * coarsen}


def preset_source(name: str, options: argparse.Namespace, **style: Any) -> SyntheticSource:
    """The preset's masks in the preset's own block sizes. style: keys to set differently."""
    return SyntheticSource(preset=name, seed=options.seed, **preset_blocks(name, options.coarsen), **style)


def layer_count(name: str, options: argparse.Namespace) -> int:
    layers = preset_model(name).layers
    return min(options.layers, layers) if options.layers > 0 else layers


def masks(name: str, options: argparse.Namespace, **style: Any) -> Iterator[BlockMask]:
    """The first mask of each of the model's first layers."""
    source, model = preset_source(name, options, **style), preset_model(name)
    for layer in range(layer_count(name, options)):
        yield source.mask(MaskRequest(layer, model.heads, model.thw, model.text_tokens))
