"""Modelled time of attention and of whole videos, from plans alone; the machine and its options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from dbsp_cli.commands.plan import linear_flops, passes
from dbsp_core import BlockMask, Plan, Strategy, make_plan
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape, Prediction, predict
from dbsp_core.models.table import ModelSpec
from dbsp_core.planning.plan import usual_layout
from scripts.reproduce.common import arguments
from scripts.reproduce.lockstep import RingPlan, nodes_of, plan_ring, predict_ring

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def modelled_arguments(description: str | None, layers: int) -> argparse.ArgumentParser:
    parser = arguments(description, layers)
    parser.set_defaults(coarsen=2)
    parser.add_argument("--hardware", default="a800", help="name of a shipped machine, or a hardware file")
    parser.add_argument("--kernel", default="sparge", help="whose constants: the paper's kernels are 8-bit")
    return parser


def machine(options: argparse.Namespace) -> Hardware:
    return load_hardware(options.hardware).with_kernel(options.kernel)


@dataclass(frozen=True)
class ModelledVideo:
    """A video with one strategy and planner."""

    rho: float  # mean over layers of the plans' ρ_s
    attention_s: float  # seconds of all self-attentions; on one GPU, which packs nothing, without packing
    other_s: float  # seconds of linear layers and all else, divided over the GPUs, and of what only one device does


def modelled_layer(
    strategy: Strategy, planner: str, mask: BlockMask, model: ModelSpec, hardware: Hardware
) -> tuple[Plan | RingPlan, Prediction]:
    """Plans one layer's mask in the planner's own layout and predicts one call: db-SP's own, or others on a ring."""
    shape = AttentionShape(1, mask.heads, model.head_dim, ELEMENT_BYTES[hardware.dtype])
    layout, nodes = usual_layout(planner, mask.grid, strategy), nodes_of(hardware, strategy.world)
    if planner != "dbsp":
        ring = plan_ring(mask, strategy, planner, layout)
        return ring, predict_ring(ring, shape, hardware, nodes, layout)
    plan = make_plan(mask, strategy, planner, layout=layout, compare=False)
    return plan, predict(plan, shape, hardware, nodes, layout)


def modelled_video(
    strategy: Strategy, planner: str, layers: Sequence[BlockMask], model: ModelSpec, hardware: Hardware
) -> ModelledVideo:
    """Models a video, in which each of the given layers represents an equal share of the model's."""
    plans, predictions = zip(
        *(modelled_layer(strategy, planner, mask, model, hardware) for mask in layers), strict=True
    )
    calls, known = passes(model) * model.layers / len(layers), hardware.constants
    packs = strategy.world > 1
    return ModelledVideo(
        rho=sum(plan.rho for plan in plans) / len(plans),
        attention_s=calls * sum(one_call.total_s - (0 if packs else one_call.pack_s) for one_call in predictions),
        other_s=passes(model) * linear_flops(model) / known.linear_flops_per_s / strategy.world + known.serial_s,
    )
