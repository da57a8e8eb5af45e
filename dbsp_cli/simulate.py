"""Modelled time of attention and of whole videos, per strategy and planner, from plans alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dbsp_core.cost.hardware import Hardware
from dbsp_core.cost.latency import AttentionShape, Prediction, Topology, exchange_cost_of, predict
from dbsp_core.cost.selection import candidates, fastest_plan, in_fastest_chunks
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.models.spec import ModelSpec
from dbsp_core.planning.keys import KEYS
from dbsp_core.planning.plan import Plan, make_plan
from dbsp_core.planning.planners import PaperConfig, PlannerConfig, require_planner
from dbsp_core.planning.wire_format import MODEL, require_wire_format

__all__ = [
    "MODELLED",
    "LayerTime",
    "RunConfig",
    "SimulationResult",
    "simulate",
    "simulate_layer",
    "strategies_for",
    "summarize",
]

MODELLED = "modelled"
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, order=True)
class RunConfig:
    """A way to run one attention. Its layout is the one that its planner is meant for."""

    strategy: Strategy
    planner: str
    keys: str = "ring"
    precision: str = MODEL.name

    def layout(self, mask: BlockMask) -> SequenceLayout:
        """Returns the layout for this mask."""
        name = "contiguous" if KEYS[self.keys].known_masks else require_planner(self.planner).layout
        return SequenceLayout.named(name, mask.grid, self.strategy)


@dataclass(frozen=True)
class SimulationResult:
    """The modelled times of a video's attention with one strategy and planner.

    Attributes:
        rho_before: Mean over layers of the contiguous plan's ρ_s; `rho`, of this plan's.
        attention_s: Seconds of all self-attentions; `exchange_s`, `exposed_p2p_s` and `pack_s` are parts of it.
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
    exposed_p2p_s: float
    pack_s: float
    other_s: float
    attention_speedup: float = 1.0
    speedup: float = 1.0
    keys: str = "ring"
    precision: str = MODEL.name
    label: str = MODELLED

    @property
    def end_to_end_s(self) -> float:
        return self.attention_s + self.other_s


@dataclass(frozen=True, eq=False)
class LayerTime:
    """One layer's plan and its predicted time."""

    plan: Plan
    prediction: Prediction


def simulate_layer(
    run: RunConfig, mask: BlockMask, model: ModelSpec, hardware: Hardware, topology: Topology
) -> LayerTime:
    """Plans one layer's mask and predicts one call of it, of one batch item."""
    shape = AttentionShape(1, mask.heads, mask.grid.tokens, model.head_dim, ELEMENT_BYTES[hardware.dtype])
    layout = run.layout(mask)
    cost = exchange_cost_of(mask, run.strategy, shape, hardware, topology, require_wire_format(run.precision))

    def make(planner: str, equal_heads: bool) -> Plan:
        config = PlannerConfig(planner, exchange_cost=cost, paper=PaperConfig(equal_heads=equal_heads))
        return make_plan(mask, run.strategy, config, layout=layout, keys=run.keys, precision=run.precision)

    if run.planner == "dbsp" and not KEYS[run.keys].known_masks:
        plan = fastest_plan(make, shape, hardware, topology, layout)
    else:
        plan = make(run.planner, False)
    plan = in_fastest_chunks(plan, mask, shape, hardware, topology, layout)
    return LayerTime(plan, predict(plan, shape, hardware, topology, layout))


def summarize(run: RunConfig, times: Sequence[LayerTime], model: ModelSpec, hardware: Hardware) -> SimulationResult:
    """Sums up a whole video, in which each of the given layers represents an equal share of the model's."""
    calls, count, world = model.calls * model.layers / len(times), len(times), run.strategy.world
    known = hardware.constants
    return SimulationResult(
        gpus=world,
        strategy=str(run.strategy),
        planner=run.planner,
        rho_before=sum(t.plan.rho_before for t in times) / count,
        rho=sum(t.plan.rho for t in times) / count,
        attention_s=calls * sum(t.prediction.total_s for t in times),
        exchange_s=calls * sum(t.prediction.exchange_s for t in times),
        exposed_p2p_s=calls * sum(t.prediction.times.exposed_s for t in times),
        pack_s=calls * sum(t.prediction.pack_s for t in times),
        keys=run.keys,
        precision=run.precision,
        other_s=model.calls * model.linear_flops / known.linear_flops_per_s / world + known.serial_s,
    )


def simulate(
    model: ModelSpec,
    masks: Sequence[BlockMask],
    hardware: Hardware,
    gpus: Iterable[int],
    planners: Sequence[str],
    *,
    strategy: str = "all",
    node_size: int | None = None,
    merges: bool = True,
    keys: Sequence[str] = ("ring",),
    precisions: Sequence[str] = (MODEL.name,),
) -> list[SimulationResult]:
    """Models every strategy and planner for every number of GPUs.

    Args:
        masks: Masks of some of the model's layers.
        strategy: "all", or one UxRy that fits every number of GPUs.
        node_size: GPUs per node; None for the hardware's.
        merges: Whether the kernel can merge partial attentions; "all" leaves out rings where it cannot.
        keys: Names in `KEYS`; "needed" is planned by "dbsp" alone.
        precisions: Names in `WIRE_FORMATS`: how q, k and v are written on their way.
    """
    results = []
    for one, topology in strategies_for(masks[0], hardware, gpus, strategy, node_size, merges):
        found = {}
        runs = []
        for way in (way for way in KEYS.values() if way.name in keys):
            by_planner = ("dbsp",) if way.known_masks else planners
            runs += [RunConfig(one, by, way.name, precision) for by in by_planner for precision in precisions]
        contiguous = RunConfig(one, "contiguous")
        for run in dict.fromkeys([contiguous, *runs]):
            times = [simulate_layer(run, mask, model, hardware, topology) for mask in masks]
            found[run] = summarize(run, times, model, hardware)
        results += [_relative_to(found[run], found[contiguous]) for run in runs]
    return results


def strategies_for(
    mask: BlockMask,
    hardware: Hardware,
    gpus: Iterable[int],
    strategy: str,
    node_size: int | None,
    merges: bool,
) -> Iterator[tuple[Strategy, Topology]]:
    """Yields every strategy for every number of GPUs, with its nodes. Arguments are those of `simulate`."""
    for world in gpus:
        if strategy == "all":
            chosen = candidates(world, mask.grid, merges)
        else:
            chosen = (Strategy.parse(strategy),)
            chosen[0].require_world(world)
        for one in chosen:
            yield one, Topology(world, node_size) if node_size else Topology.on(hardware, world)


def _relative_to(one: SimulationResult, base: SimulationResult) -> SimulationResult:
    return replace(
        one,
        attention_speedup=base.attention_s / one.attention_s,
        speedup=base.end_to_end_s / one.end_to_end_s,
    )
