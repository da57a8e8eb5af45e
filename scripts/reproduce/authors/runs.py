"""The authors' runs by the latency model: attention and end-to-end times from a machine's constants and their ρ_s."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from dbsp_cli.commands.plan import linear_flops, passes
from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS, ModelSpec
from scripts.reproduce.authors.measured import BURST, DBSP, DENSITIES, PARO, PASSES, SPARGE, Bar
from scripts.reproduce.common import TABLE_1
from scripts.reproduce.lockstep import RingPrediction, plan_ring, predict_ring

BALANCED_RHO = 1.015  # of db-SP's plans: the slides' 1.025 for heads and below 1.01 for rings
BLOCK = 256
_RATES = {"flops_per_s": 1.0, "score_s": 0.0, "call_s": 0.0, "linear_flops_per_s": 1.0, "serial_s": 0.0}
"""Constants that an attention without active blocks does not depend on, as those of all machines."""


@dataclass(frozen=True)
class Unknowns:
    """Parameters of the bars in addition to a machine's constants.

    Attributes:
        sparge_density: Share of active blocks under SpargeAttn (cdf 0.9, similarity 0.1), by model: not published.
        tile_cost: Time of BurstEngine's blocks, whose tiles are small, over that of others. The paper says 1.25.
        token_head_s: What an attention takes on top of blocks and exchanges for each token and head, on any number of
            GPUs, by `method_of`: predicting masks (SpargeAttn), permuting tokens (PAROAttention; db-SP's scripts leave
            it out), and the rest of what is not said.
    """

    sparge_density: dict[str, float]
    tile_cost: float
    token_head_s: dict[str, float]

    def call_s(self, method: str, model: str) -> float:
        """Returns the seconds of an attention on top of blocks and exchanges."""
        spec = MODEL_SPECS[model]
        return self.token_head_s[method] * spec.tokens * spec.heads


UNKNOWNS = Unknowns(
    {"wan2.1-t2v-14b": 0.8667, "cogvideox1.5-5b": 0.5278},
    tile_cost=1.4856,
    token_head_s={PARO: 2.957e-9, DBSP: 1.156e-9, SPARGE: 2.999e-9},
)
"""As `scripts.reproduce.authors.fit` finds them."""


def as_run(name: str) -> ModelSpec:
    """The model without guidance, so with one pass a step."""
    spec = MODEL_SPECS[name]
    run = replace(spec, video=replace(spec.video, guidance_scale=1.0, guidance_scale_2=None))
    assert passes(run) == PASSES * run.video.steps
    return run


@functools.cache
def _without_blocks(model: str, strategy: Strategy, known: Constants) -> RingPrediction:
    spec = MODEL_SPECS[model]
    grid = BlockGrid.uniform(spec.tokens, BLOCK)
    empty = BlockMask(np.zeros((spec.heads, grid.nq, grid.nk), dtype=bool), grid)
    machine = Hardware("", "", "", known, dict.fromkeys((*vars(known), "gpus_per_node"), "assumed"))
    shape = AttentionShape(1, spec.heads, spec.head_dim)
    return predict_ring(plan_ring(empty, strategy), shape, machine)


def dense_s(model: str, known: Constants, gpus: int = 8) -> float:
    """One attention's blocks on one of the GPUs, all of them."""
    spec = MODEL_SPECS[model]
    scores = float(spec.tokens) ** 2 * spec.heads / gpus
    return scores * (4 * spec.head_dim / known.flops_per_s + known.score_s)


def attention_s(model: str, strategy: Strategy, known: Constants, blocks: float) -> float:
    """One attention. blocks: of the rank that has most, over all blocks of an even share

    Ring sends are hidden: each takes less than half as long as the blocks that are computed meanwhile.
    """
    rest = _without_blocks(model, strategy, replace(known, **_RATES))
    compute_s = rest.times.compute_s + blocks * dense_s(model, known, strategy.world)
    return rest.exchange_s + rest.pack_s + known.call_s + compute_s


def rho_of(model: str, method: str) -> float:
    """Table 1's ρ_s of contiguous plans, mean over strategies; taken for both densities and for 4 GPUs.

    The bars of a panel's strategies differ far less than Table 1's ρ_s do.
    """
    preset = f"{model}-sparge" if method == SPARGE else model
    return float(np.mean([row.rho for row in TABLE_1 if row.preset == preset]))


def method_of(bar: Bar) -> str:
    """The key of `Unknowns.token_head_s` for a bar."""
    return SPARGE if bar.method == SPARGE else DBSP if bar.way == DBSP else PARO


def bar_attention_s(bar: Bar, known: Constants, unknowns: Unknowns) -> float:
    """All attentions of a bar's video. Their scripts run db-SP as Ulysses."""
    spec = as_run(bar.model)
    known = replace(known, call_s=unknowns.call_s(method_of(bar), bar.model))
    blocks = unknowns.sparge_density[bar.model] if bar.method == SPARGE else DENSITIES[bar.model, bar.method]
    if bar.way == DBSP:
        strategy, blocks = Strategy(bar.gpus, 1), blocks * BALANCED_RHO
    elif bar.way == BURST:
        strategy, blocks = Strategy(1, bar.gpus), blocks * unknowns.tile_cost
    else:
        strategy, blocks = Strategy.parse(bar.way), blocks * rho_of(bar.model, bar.method)
    return passes(spec) * spec.layers * attention_s(bar.model, strategy, known, blocks)


def other_s(model: str, known: Constants, gpus: int = 8) -> float:
    spec = as_run(model)
    return passes(spec) * linear_flops(spec) / known.linear_flops_per_s / gpus + known.serial_s


def end_to_end_s(bar: Bar, known: Constants, unknowns: Unknowns) -> float:
    return other_s(bar.model, known, bar.gpus) + bar_attention_s(bar, known, unknowns)
