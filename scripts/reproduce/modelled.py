"""Modelled time of attention and of whole videos, from plans alone; the machine, masks and the paper's own numbers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dbsp_cli.modelled import linear_flops, passes
from dbsp_core import BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape, Prediction, predict
from dbsp_core.models.table import ModelSpec
from dbsp_core.planning.plan import usual_layout
from scripts.reproduce.common import arguments, masks
from scripts.reproduce.lockstep import RingPlan, nodes_of, plan_ring, predict_ring, rho_before

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


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class RunConfig:
    """A strategy and a planner. The layout is the one that the planner is meant for."""

    strategy: Strategy
    planner: str

    def layout(self, mask: BlockMask) -> SequenceLayout:
        """Returns the planner's layout for a mask."""
        return usual_layout(self.planner, mask.grid, self.strategy)


@dataclass(frozen=True)
class SimulationResult:
    """The modelled times of a video's attention with one strategy and planner.

    Attributes:
        rho_before: Mean over layers of the contiguous plan's ρ_s; `rho`, of this plan's.
        attention_s: Seconds of all self-attentions; `exchange_s` and `pack_s` are parts of it.
        other_s: Seconds of linear layers and all else, divided over the GPUs, and of what only one device does.
    """

    gpus: int
    strategy: str
    planner: str
    rho_before: float
    rho: float
    attention_s: float
    exchange_s: float
    pack_s: float
    other_s: float

    @property
    def end_to_end_s(self) -> float:
        return self.attention_s + self.other_s


@dataclass(frozen=True, eq=False)
class LayerTime:
    """One layer's plan and its predicted time; and ρ_s of contiguous plans of its mask."""

    plan: Plan | RingPlan
    prediction: Prediction
    rho_before: float


def simulate_layer(
    run: RunConfig, mask: BlockMask, model: ModelSpec, hardware: Hardware, nodes: Sequence[int]
) -> LayerTime:
    """Plans one layer's mask and predicts one call of it, of one batch item: db-SP's own, or others on a ring."""
    shape = AttentionShape(1, mask.heads, model.head_dim, ELEMENT_BYTES[hardware.dtype])
    layout = run.layout(mask)
    before = rho_before(mask, run.strategy)
    if run.planner != "dbsp":
        ring = plan_ring(mask, run.strategy, run.planner, layout)
        return LayerTime(ring, predict_ring(ring, shape, hardware, nodes, layout), before)
    plan = make_plan(mask, run.strategy, run.planner, layout=layout, compare=False)
    return LayerTime(plan, predict(plan, shape, hardware, nodes, layout), before)


def summarize(run: RunConfig, times: Sequence[LayerTime], model: ModelSpec, hardware: Hardware) -> SimulationResult:
    """Sums up a whole video, in which each of the given layers represents an equal share of the model's."""
    calls, count, world = passes(model) * model.layers / len(times), len(times), run.strategy.world
    known = hardware.constants
    return SimulationResult(
        gpus=world,
        strategy=str(run.strategy),
        planner=run.planner,
        rho_before=sum(t.rho_before for t in times) / count,
        rho=sum(t.plan.rho for t in times) / count,
        attention_s=calls * sum(t.prediction.total_s for t in times),
        exchange_s=calls * sum(t.prediction.exchange_s for t in times),
        pack_s=calls * sum(t.prediction.pack_s for t in times),
        other_s=passes(model) * linear_flops(model) / known.linear_flops_per_s / world + known.serial_s,
    )


def times_of(way: RunConfig, layers: Sequence[BlockMask], model: ModelSpec, hardware: Hardware) -> list[LayerTime]:
    """Every layer's predicted time under one way, on the machine's nodes."""
    nodes = nodes_of(hardware, way.strategy.world)
    return [simulate_layer(way, mask, model, hardware, nodes) for mask in layers]


def video(way: RunConfig, layers: Sequence[BlockMask], model: ModelSpec, hardware: Hardware) -> SimulationResult:
    return summarize(way, times_of(way, layers, model, hardware), model, hardware)
