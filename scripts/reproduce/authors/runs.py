"""The authors' runs by the latency model: attention and end-to-end times from a machine's constants and their ρ_s."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from dbsp_cli.modelled import linear_flops, passes
from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from scripts.reproduce.authors.measured import BURST, DBSP, DENSITIES, PASSES, SPARGE, STRATEGIES, Bar
from scripts.reproduce.common import TABLE_1
from scripts.reproduce.lockstep import RingPrediction, plan_ring, predict_ring

BALANCED_RHO = 1.015
"""Of db-SP's plans: the slides' 1.025 for heads and below 1.01 for rings."""
BLOCK = 256


@dataclass(frozen=True)
class Unknowns:
    """What the bars need beside a machine's constants.

    Attributes:
        sparge_density: Share of dense blocks under SpargeAttn (cdf 0.9, similarity 0.1), by model: not published.
        tile_cost: Time of BurstEngine's blocks, whose tiles are small, over that of others. The paper says 1.25.
        reordered_cost: Time of PAROAttention's blocks under db-SP over theirs in contiguous plans, beyond what ρ_s
            explains. No reason is known: see docs/latency-model.md.
    """

    sparge_density: dict[str, float]
    tile_cost: float
    reordered_cost: float


def as_run(name: str) -> ModelSpec:
    """The model without guidance, so with one pass a step."""
    spec = MODEL_SPECS[name]
    run = replace(spec, video=replace(spec.video, guidance_scale=1.0, guidance_scale_2=None))
    assert passes(run) == PASSES * run.video.steps
    return run


@functools.cache
def _without_blocks(model: str, strategy: Strategy, constants: Constants) -> RingPrediction:
    spec = MODEL_SPECS[model]
    grid = BlockGrid.uniform(spec.tokens, BLOCK)
    empty = BlockMask(np.zeros((spec.heads, grid.nq, grid.nk), dtype=bool), grid)
    machine = Hardware("", "", "", constants, dict.fromkeys((*vars(constants), "gpus_per_node"), "assumed"))
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    return predict_ring(plan_ring(empty, strategy), shape, machine)


def dense_s(model: str, known: Constants) -> float:
    """One attention's blocks on one of 8 GPUs, all of them."""
    spec = MODEL_SPECS[model]
    scores = float(spec.tokens) ** 2 * spec.heads / 8
    return scores * (4 * spec.head_dim / known.flops_per_s + known.score_s)


def attention_s(model: str, strategy: Strategy, known: Constants, blocks: float) -> float:
    """One attention. blocks: of the rank that has most, over all blocks of an even share

    Hand-overs hide: beside their blocks each takes less than half as long.
    """
    beside = _without_blocks(model, strategy, known)
    return (
        beside.exchange_s + beside.pack_s + beside.launch_s + beside.times.compute_s + blocks * dense_s(model, known)
    )


def rho_of(model: str, strategy: Strategy, method: str = "") -> float:
    """Table 1's, of contiguous plans; taken for both densities, of which it says neither."""
    preset = f"{model}-sparge" if method == SPARGE else model
    return next(row.rho for row in TABLE_1 if (row.preset, row.strategy) == (preset, str(strategy)))


def bar_attention_s(bar: Bar, known: Constants, unknowns: Unknowns) -> float:
    """All attentions of a bar's video."""
    spec, sparge = as_run(bar.model), bar.method == SPARGE
    density = unknowns.sparge_density[bar.model] if sparge else DENSITIES[bar.model, bar.method]
    if bar.way == DBSP:
        ways = STRATEGIES[:1] if sparge else STRATEGIES
        blocks = density * BALANCED_RHO * (1 if sparge else unknowns.reordered_cost)
        one = min(attention_s(bar.model, strategy, known, blocks) for strategy in ways)
    elif bar.way == BURST:
        one = attention_s(bar.model, Strategy(1, 8), known, density * unknowns.tile_cost)
    else:
        strategy = Strategy.parse(bar.way)
        one = attention_s(bar.model, strategy, known, density * rho_of(bar.model, strategy, bar.method))
    return passes(spec) * spec.layers * one


def other_s(model: str, known: Constants) -> float:
    spec = as_run(model)
    return passes(spec) * linear_flops(spec) / known.linear_flops_per_s / 8 + known.serial_s
