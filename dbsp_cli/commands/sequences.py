"""`dbsp plan --sequences`: several sequences at once, shared out over bags of GPUs; topologies compared."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dbsp_cli.output import TextTable, print_json, print_tables
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost.hardware import Hardware, load_hardware
from dbsp_core.cost.sequences import (
    FLUX,
    LayerSize,
    SequencePlanMetrics,
    SequenceWork,
    evaluate,
    gamma_of,
    sequence_cost,
)
from dbsp_core.models.lookup import require_model
from dbsp_core.planning.sequences.bags import BagTopology
from dbsp_core.planning.sequences.sequence_plan import SequencePlan, plan_sequences
from dbsp_core.planning.sequences.streams import (
    DrawnSequences,
    StreamAssumptions,
    draw,
    parse_streams,
)
from dbsp_core.planning.wire_format import MODEL, require_wire_format
from dbsp_core.sources import MaskRequest
from dbsp_core.utils.byte_sizes import in_bytes
from dbsp_core.utils.errors import UserError

__all__ = ["ALL_BAGS", "FLUX_NAME", "SequenceRequest", "print_sequence_plans"]

ALL_BAGS = "all"
FLUX_NAME = "flux.1"
UNBALANCED = "g1n1"


@dataclass(frozen=True)
class SequenceRequest:
    """The options of `dbsp plan` for sequences; see its help. None for `gpus` means as many as the streams have."""

    sequences: str
    gpus: int | None = None
    bags: str = ALL_BAGS
    model: str = "wan2.1-t2v-14b"
    hardware: str = "h200"
    mask: str = "dense"
    node_size: int = 8
    max_tokens: int | None = None
    seed: int = 0
    precision: str = MODEL.name


@dataclass(frozen=True, eq=False)
class _Candidate:
    plan: SequencePlan
    metrics: SequencePlanMetrics
    plan_ms: float

    @property
    def name(self) -> dict[str, str]:
        return {"bags": str(self.plan.topology)}


def print_sequence_plans(request: SequenceRequest, as_json: bool) -> None:
    """Draws sequences, shares them out in every way asked for, and prints the results. Times are modelled."""
    streams, hardware = parse_streams(request.sequences), load_hardware(request.hardware)
    layer = FLUX if request.model.casefold() == FLUX_NAME else LayerSize.of(require_model(request.model))
    layer = replace(layer, wire=require_wire_format(request.precision))
    world = sum(stream.gpus for stream in streams) if request.gpus is None else request.gpus
    assumptions = StreamAssumptions() if layer.text else StreamAssumptions(text=(0, 0))
    drawn = draw(streams, world, request.seed, assumptions)
    work = _work(drawn, layer, request.mask)
    candidates = _candidates(request, drawn, work, layer, hardware, world)
    best = min(candidates, key=lambda one: one.metrics.seconds)
    if as_json:
        about = {
            "sequences": [str(stream) for stream in streams],
            "gpus": world,
            "model": request.model,
            "hardware": hardware.name,
            "sources": dict(hardware.sources),
            "gamma": gamma_of(layer, hardware),
            "mask": request.mask,
            "precision": request.precision,
            "assumed": {"text_tokens": assumptions.text, "aspect_ratio": assumptions.area, "seed": request.seed},
            "tokens": work.tokens.tolist(),
        }
        print_json(**about, plans=[_record(one, layer) for one in candidates], proposed=best.name)
        return
    shown = sorted(candidates, key=lambda one: one.metrics.seconds)
    tokens = f"{len(drawn)} sequences, {int(work.tokens.sum()):,} tokens"
    title = f"{tokens} of {request.model} on {world} GPUs, mask {request.mask}"
    print_tables([_table(shown, best, layer, title, hardware, assumptions)])


def _work(drawn: DrawnSequences, layer: LayerSize, mask: str) -> SequenceWork:
    """Counts the dense blocks of every sequence's rows, under a static mask source as a configuration names it."""
    source = DbspConfig.load(mask).mask
    if source.changes == "per_call":
        raise UserError(
            f"mask {mask!r} is predicted from queries and keys, which do not exist here; use another source"
        )
    sizes = zip(drawn.text.tolist(), drawn.thw.tolist(), strict=True)
    requests = [MaskRequest(0, layer.heads, (thw[0], thw[1], thw[2]), text) for text, thw in sizes]
    return SequenceWork.under(source, requests, {})


def _candidates(
    request: SequenceRequest,
    drawn: DrawnSequences,
    work: SequenceWork,
    layer: LayerSize,
    hardware: Hardware,
    world: int,
) -> list[_Candidate]:
    """Plans without bags, then every topology; leaves out those that cannot hold the sequences."""
    grid = work.grids[0]
    cost = sequence_cost(layer, hardware, grid.block_q, grid.block_k)
    picoseconds, tokens = cost.picoseconds(work.tokens, work.blocks), work.tokens
    found: list[_Candidate] = []
    failure = None
    for topology in _topologies(request, world):
        start = time.perf_counter()
        try:
            plan = plan_sequences(picoseconds, tokens, drawn.loader, topology, request.max_tokens)
        except UserError as error:
            if request.bags != ALL_BAGS:
                raise
            failure = error
            continue
        plan_ms = (time.perf_counter() - start) * 1e3
        metrics = evaluate(plan, work, drawn.loader, cost, layer, hardware, request.node_size)
        found.append(_Candidate(plan, metrics, plan_ms))
    if failure is not None and not found:
        raise failure
    return found


def _topologies(request: SequenceRequest, world: int) -> Iterator[BagTopology]:
    nodes = BagTopology.nodes(world, request.node_size)
    if request.bags == ALL_BAGS:
        chosen = list(dict.fromkeys([*BagTopology.candidates(world, request.node_size), nodes]))
    else:
        chosen = [BagTopology.parse(text, world) for text in request.bags.split(",")]
    yield from dict.fromkeys([BagTopology.parse(UNBALANCED, world), *chosen, nodes])


def _record(one: _Candidate, layer: LayerSize) -> dict[str, Any]:
    metrics, topology = one.metrics, one.plan.topology
    return one.name | {
        "largest_bag": max(topology.sizes),
        "wir": metrics.wir if math.isfinite(metrics.wir) else None,
        "rho": metrics.rho,
        "tokens": metrics.tokens.tolist(),
        "rehomed_bytes": metrics.rehomed_bytes,
        "between_nodes_bytes": metrics.between_nodes_bytes,
        "sent_bytes": metrics.sent_bytes.tolist(),
        "forward_s": metrics.seconds * layer.layers,
        "plan_ms": one.plan_ms,
        "bag": one.plan.bag.tolist(),
    }


def _table(
    candidates: list[_Candidate],
    best: _Candidate,
    layer: LayerSize,
    title: str,
    hardware: Hardware,
    assumptions: StreamAssumptions,
) -> TextTable:
    rows = []
    for one in candidates:
        metrics = one.metrics
        bags = "none" if one.plan.topology.unit == 1 else str(one.plan.topology)
        rows.append(
            (
                bags,
                f"{metrics.wir:.3f}" if math.isfinite(metrics.wir) else "∞",
                f"{metrics.rho:.3f}",
                f"{int(metrics.tokens.min()):,} to {int(metrics.tokens.max()):,}",
                in_bytes(metrics.rehomed_bytes),
                in_bytes(int(metrics.sent_bytes.max())),
                f"{metrics.seconds * layer.layers:.3f}",
            )
        )
    return TextTable(
        title,
        ("bags", "WIR", "ρ_s", "tokens a GPU", "re-homed", "sent", "forward, s"),
        rows,
        f"proposed, the least time: --bags {best.name['bags']}\n"
        "WIR: most over least of the GPUs' work; ρ_s: slowest over mean of attention in a bag;\n"
        "re-homed: hidden states moved before and after; sent: by a GPU in a layer's exchanges;\n"
        "forward: modelled, all layers\n"
        f"γ {gamma_of(layer, hardware):.2f} from the constants of {hardware.name}\n{assumptions.in_words()}",
        left=("bags",),
        spare=("re-homed", "sent", "tokens a GPU"),
    )
