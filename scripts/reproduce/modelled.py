"""Parts that modelled figures share: the machine, the paper's own numbers, and masks planned once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from dbsp_core import BlockMask
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.models.table import ModelSpec
from scripts.reproduce.common import arguments, masks
from scripts.reproduce.lockstep import nodes_of
from scripts.reproduce.simulate import LayerTime, RunConfig, SimulationResult, simulate_layer, summarize

MODELLED = "modelled, synthetic masks"

PAPER_SCALING = {"U8R1": 6.09, "U1R8": 5.81}
"""§3.1: Wan2.1-14B on 8 GPUs over one GPU, contiguous plans."""

PAPER_END_TO_END = {
    ("wan2.1-t2v-14b", 8): (1.12, 1.26),
    ("cogvideox1.5-5b", 8): (1.16, 1.42),
    ("wan2.1-t2v-14b", 4): (1.10, 1.15),
    ("cogvideox1.5-5b", 4): (1.10, 1.15),
}
"""§6.2: least and largest mean speed-up over the baselines, by model and GPUs."""

PAPER_ATTENTION = {("U4R1", 4): 1.26, ("U8R1", 8): 1.38, ("U1R4", 4): 1.22, ("U1R8", 8): 1.42}
"""§6.2: attention speed-up over Ulysses and over Ring, mean over models, on 4 and 8 GPUs."""


def modelled_arguments(description: str | None, layers: int) -> argparse.ArgumentParser:
    parser = arguments(description or "", layers)
    parser.set_defaults(coarsen=2)
    parser.add_argument("--hardware", default="a800", help="name of a shipped machine, or a hardware file")
    parser.add_argument("--kernel", default="sparge", help="whose constants: the paper's kernels are 8-bit")
    return parser


def machine(options: argparse.Namespace) -> Hardware:
    return load_hardware(options.hardware).with_kernel(options.kernel)


def model_masks(preset: str, options: argparse.Namespace, **style: Any) -> list[BlockMask]:
    return list(masks(preset, options, **style))


def times_of(way: RunConfig, layers: Sequence[BlockMask], model: ModelSpec, hardware: Hardware) -> list[LayerTime]:
    """Every layer's predicted time under one way, on the machine's nodes."""
    nodes = nodes_of(hardware, way.strategy.world)
    return [simulate_layer(way, mask, model, hardware, nodes) for mask in layers]


def video(way: RunConfig, layers: Sequence[BlockMask], model: ModelSpec, hardware: Hardware) -> SimulationResult:
    return summarize(way, times_of(way, layers, model, hardware), model, hardware)
