"""Programs of ranks: a few attentions by one of the library's ways, compared with dense attention in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dbsp_core import DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.redistribution import Redistribution
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import LocalQK
from dbsp_diffusers.api import disable, enable
from dbsp_diffusers.report_hook import report_or_say_why_not
from scripts.checks.stress.phases import WINDOW
from tests.support.attention_cases import Case, random_mask, shards
from tests.support.oracle import dense_attention, largest_difference
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process, masked_attention

CALLS = 3
_REFERENCE = ContextVar("reference", default=False)


@contextmanager
def reference() -> Iterator[None]:
    """Marks calls by which a rank computes the expected output by itself: no other rank waits for them."""
    token = _REFERENCE.set(True)
    try:
        yield
    finally:
        _REFERENCE.reset(token)


def in_reference() -> bool:
    return _REFERENCE.get()


calls_done = 0  # number of calls of this rank's program that have returned


def _count_call() -> None:
    global calls_done
    calls_done += 1


@dataclass(frozen=True)
class Values(Case):
    """Inputs of a program; one rank may be given something else. `seed` is that of the mask."""

    strategy: str = "U1R2"
    heads: int = 4
    tokens: int = 200
    text_tokens: int = 8
    thw: tuple[int, int, int] = (4, 6, 8)
    debug: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the configuration
    timestep: float = 900.0
    cfg_branch: int | None = None
    latents_seed: int = 7
    layer: int = 0
    backward: bool = False  # whether attention by itself is followed by its backward
    extra: int = 0  # positions too many
    scale: float | None = None
    gradients: bool = False
    finite: bool = True  # whether keys have no NaN

    def configured(self, **settings: Any) -> DbspConfig:
        """Returns the configuration of `settings` and this rank's own."""
        return with_debug({**settings, **self.settings}, self.debug)


def attention(values: Values) -> float:
    """Computes three calls under one plan and mask."""
    group, mask = SequenceGroup.from_group(), random_mask(values, values.grid)
    layout = SequenceLayout.named(values.layout, values.grid, Strategy.parse(values.strategy))
    plan = make_plan(mask, values.strategy, values.planner, layout=layout, keys=values.keys)
    attend = DualBalancedAttention.prepare(plan, mask, layout, group, kernel=values.kernel, debug=values.debug)
    worst = 0.0
    for call in range(CALLS):
        full, local, mine, positions = _inputs(values, layout, group.rank, torch.Generator().manual_seed(call))
        for tensor in local:
            tensor.requires_grad_(values.backward or values.gradients)
        out = attend(*local, scale=values.scale)
        _count_call()
        if values.backward:
            out.sum().backward()
            whole = [tensor.double().requires_grad_() for tensor in full]
            dense_attention(*whole, mask, torch.arange(values.tokens)).sum().backward()
            for shard, leaf in zip(local, whole, strict=True):
                worst = max(worst, largest_difference(shard.grad[:, :, positions], leaf.grad[:, :, mine]))
        expected = dense_attention(full[0][:, :, mine], full[1], full[2], mask, queries=mine)
        worst = max(worst, largest_difference(out.detach()[:, :, positions], expected))
    return worst


def session(values: Values) -> float:
    """Runs three denoising steps of one layer, and a report where one is asked for."""
    group = SequenceGroup.from_group()
    config = values.configured()
    inner = observed_session(config, group, Strategy.parse(values.strategy), heads=values.heads, layers=2)
    alone = MaskProvider(config.mask, config.dense_schedule, values.heads, 2)
    worst, seed = 0.0, torch.Generator().manual_seed(5)
    for step in range(CALLS):
        timestep = values.timestep - step
        layout = inner.begin(Video(values.thw), timestep=timestep, cfg_branch=values.cfg_branch)
        alone.begin([Video(values.thw)], timestep, values.cfg_branch)
        full, local, mine, positions = _inputs(values, layout, group.rank, seed, size=2.0)
        out = inner.attend(values.layer, *local, scale=values.scale)
        _count_call()
        with reference():
            expected = masked_attention(*full, alone.mask(values.layer, LocalQK.alone(full[0], full[1])))
        worst = max(worst, largest_difference(out[:, :, positions], expected[:, :, mine]))
    inner.flush()
    if config.report:
        report_or_say_why_not([inner], "tiny", "stress test")
    return worst


def transformer(values: Values) -> float:
    """Runs two passes of a tiny Wan transformer with db-SP enabled on it, and one after."""
    from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs

    model = make_tiny_transformer("wan")
    inputs = tiny_inputs("wan", (3, 6, 10), values.batch)
    generator = torch.Generator().manual_seed(values.latents_seed)
    inputs["hidden_states"] = torch.randn(inputs["hidden_states"].shape, generator=generator)
    with torch.no_grad():
        config = values.configured(mask=WINDOW)
        with reference():
            alone = attach_single_process(model, config)
            expected = model(**inputs)[0]
            alone.detach()
            stock = model(**inputs)[0]
        enable(model, config, strategy=values.strategy)
        worst = 0.0
        for _ in range(2):
            worst = max(worst, largest_difference(model(**inputs)[0], expected))
            _count_call()
        disable(model)
        return max(worst, largest_difference(model(**inputs)[0], stock))


def redistribution(values: Values) -> float:
    """Sends tokens to another layout and back, twice."""
    group, strategy = SequenceGroup.from_group(), Strategy.parse(values.strategy)
    source = SequenceLayout.contiguous(values.tokens, strategy.world)
    target = SequenceLayout.striped(values.grid, strategy)
    way = Redistribution.between(source, target, group, debug=values.debug)
    tokens = torch.randn(source.shard, values.head_dim, dtype=values.dtype)
    worst, (_, positions) = 0.0, source.tokens_at(group.rank)
    for _ in range(CALLS):
        worst = max(worst, largest_difference(way.back(way.there(tokens))[positions], tokens[positions]))
        _count_call()
    return worst


PROGRAMS: dict[str, Callable[[Values], float]] = {
    "attention": attention,
    "session": session,
    "transformer": transformer,
    "redistribution": redistribution,
}
"""Each returns the largest absolute error on this rank."""


def _inputs(
    values: Values, layout: SequenceLayout, rank: int, draws: torch.Generator, size: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Draws q, k and v of all tokens. Returns them, this rank's shards, its tokens and their positions there."""
    shape = values.batch, values.heads, layout.tokens, values.head_dim
    full = [torch.randn(shape, generator=draws, dtype=values.dtype) * size for _ in range(3)]
    local, mine, positions = shards(full, layout, rank, padded=True)
    local = [F.pad(tensor, (0, 0, 0, values.extra)) for tensor in local]
    if not values.finite:
        local[1][0, 0, 0, 0] = torch.nan
    return full, local, mine, positions
