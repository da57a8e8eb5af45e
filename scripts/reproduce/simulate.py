"""Modelled time of attention and of whole videos, per strategy and planner, from plans alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dbsp_cli.modelled import linear_flops, passes
from dbsp_core.cost.machine import Hardware
from dbsp_core.cost.prediction import AttentionShape, Prediction, candidates, predict
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.table import ModelSpec
from dbsp_core.planning.plan import Plan, make_plan, usual_layout
from scripts.reproduce.lockstep import RingPlan, nodes_of, plan_ring, predict_ring, rho_before

MODELLED = "modelled"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, order=True)
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
        speedup: Over the contiguous planner on the same strategy; `attention_speedup`, of attention alone.
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
    attention_speedup: float = 1.0
    speedup: float = 1.0
    label: str = MODELLED

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


def simulate(
    model: ModelSpec,
    masks: Sequence[BlockMask],
    hardware: Hardware,
    gpus: Iterable[int],
    planners: Sequence[str],
    *,
    strategy: str | None = None,
    node_size: int | None = None,
) -> list[SimulationResult]:
    """Models every strategy and planner for every number of GPUs.

    Args:
        masks: Masks of some of the model's layers.
        strategy: One UxRy that fits every number of GPUs, or None for all.
        node_size: GPUs per node, or None for the hardware's.
    """
    results = []
    for world in gpus:
        nodes = nodes_of(replace(hardware, gpus_per_node=node_size or hardware.gpus_per_node), world)
        for one in candidates(world, masks[0].grid) if strategy is None else [Strategy.parse(strategy)]:
            found = {}
            for planner in dict.fromkeys(["contiguous", *planners]):
                run = RunConfig(one, planner)
                times = [simulate_layer(run, mask, model, hardware, nodes) for mask in masks]
                found[planner] = summarize(run, times, model, hardware)
            results += [_relative_to(found[planner], found["contiguous"]) for planner in planners]
    return results


def _relative_to(one: SimulationResult, base: SimulationResult) -> SimulationResult:
    return replace(
        one,
        attention_speedup=base.attention_s / one.attention_s,
        speedup=base.end_to_end_s / one.end_to_end_s,
    )
