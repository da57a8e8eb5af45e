"""Programs of ranks: a few attentions by one of the library's ways, compared with dense attention in one process."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.redistribution import Redistribution
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.masks.mask_writer import save_mask
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.mask_provider import MaskProvider
from dbsp_core.sources import LocalQK, SpargeSource
from dbsp_diffusers.api import disable, enable
from dbsp_diffusers.report_hook import report_or_say_why_not
from scripts.checks.stress.faults.fault_injection import Injection, reference
from scripts.checks.stress.faults.phases import WINDOW
from tests.support.attention_cases import shards
from tests.support.oracle import dense_attention, largest_difference
from tests.support.single_process import attach_single_process, masked_attention

HEADS, HEAD_DIM, TOKENS, CALLS = 4, 16, 200, 3
THW = (4, 6, 8)
DONE = "attention is done:"
TIMEOUT_S = 4.0
"""Of the process group."""


@dataclass(frozen=True)
class Values:
    """Inputs of a program; one rank may be given something else.

    settings: of the configuration, "debug" and "record"; and for attention by itself "keys" and "backward"
    layout: of tokens outside attention;  batch, dtype: of q, k and v;  extra: positions too many
    flipped: whether what is predicted is turned round;  mask_file: "" for none, or what became of it
    """

    strategy: str = "U1R2"
    settings: dict[str, Any] = field(default_factory=dict)
    heads: int = HEADS
    head_dim: int = HEAD_DIM
    thw: tuple[int, int, int] = THW
    timestep: float = 900.0
    cfg_branch: int | None = None
    latents_seed: int = 7
    layer: int = 0
    mask_seed: int = 0
    planner: str = "dbsp"
    layout: str = "contiguous"
    batch: int = 1
    dtype: str = "float32"
    extra: int = 0
    scale: float | None = None
    kernel: str = "auto"
    gradients: bool = False
    finite: bool = True
    flipped: bool = False
    mask_file: str = ""


def attention(values: Values) -> float:
    """Computes three calls under one plan and mask."""
    group, settings = SequenceGroup.from_group(), values.settings
    grid = BlockGrid.uniform(TOKENS, block=16)
    generator = torch.Generator().manual_seed(values.mask_seed)
    bits = torch.rand(values.heads, grid.nq, grid.nk, generator=generator) < 0.5
    if settings.get("keys") == "needed":  # or every rank would need all keys, and nothing be fetched apart
        bits &= (torch.arange(grid.nq)[:, None] - torch.arange(grid.nk)).abs() <= 3
    mask = BlockMask(bits, grid)
    layout = SequenceLayout.named(values.layout, grid, Strategy.parse(values.strategy))
    plan = make_plan(mask, values.strategy, values.planner, layout=layout, keys=settings.get("keys", "all"))
    attend = DualBalancedAttention.prepare(
        plan, mask, layout, group, kernel=values.kernel, debug=settings.get("debug", False)
    )
    backward, worst = settings.get("backward", False), 0.0
    for call in range(CALLS):
        full, local, mine, positions = _inputs(values, layout, group.rank, torch.Generator().manual_seed(call))
        for one in local:
            one.requires_grad_(backward or values.gradients)
        out = attend(*local, scale=values.scale)
        print(DONE, call, flush=True)
        if backward:
            out.sum().backward()
            whole = [one.double().requires_grad_() for one in full]
            dense_attention(*whole, mask, torch.arange(TOKENS)).sum().backward()
            for one, of_all in zip(local, whole, strict=True):
                worst = max(worst, largest_difference(one.grad[:, :, positions], of_all.grad[:, :, mine]))
        expected = dense_attention(full[0][:, :, mine], full[1], full[2], mask, queries=mine)
        worst = max(worst, largest_difference(out.detach()[:, :, positions], expected))
    return worst


def configured(settings: Mapping[str, Any]) -> DbspConfig:
    """Returns settings with what ranks otherwise read from $DBSP_DEBUG and $DBSP_RECORD."""
    given = dict(settings)
    debug, record = given.pop("debug", False), given.pop("record", None)
    return replace(DbspConfig.load(given), debug=debug, record=record)


def session(values: Values) -> float:
    """Runs three denoising steps of one layer, and a report where one is asked for."""
    group, settings = SequenceGroup.from_group(), dict(values.settings)
    if values.mask_file:
        settings["mask"] = {"source": "file", "path": _mask_file(values, group.rank)}
    if values.flipped:
        _flip_predicted_masks()
    config = configured(settings)
    inner = observed_session(config, group, Strategy.parse(values.strategy), heads=values.heads, layers=2)
    alone = MaskProvider(config.mask, config.dense_schedule, values.heads, 2)
    worst, seed = 0.0, torch.Generator().manual_seed(5)
    for step in range(CALLS):
        timestep = values.timestep - step
        layout = inner.begin(Video(values.thw), timestep=timestep, cfg_branch=values.cfg_branch)
        alone.begin([Video(values.thw)], timestep, values.cfg_branch)
        full, local, mine, positions = _inputs(values, layout, group.rank, seed, size=2.0)
        out = inner.attend(values.layer, *local, scale=values.scale)
        print(DONE, step, flush=True)
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
        config = configured({"mask": WINDOW, **values.settings})
        with reference():
            alone = attach_single_process(model, config)
            expected = model(**inputs)[0]
            alone.detach()
            stock = model(**inputs)[0]
        enable(model, config, strategy=values.strategy)
        worst = 0.0
        for call in range(2):
            worst = max(worst, largest_difference(model(**inputs)[0], expected))
            print(DONE, call, flush=True)
        disable(model)
        return max(worst, largest_difference(model(**inputs)[0], stock))


def redistribution(values: Values) -> float:
    """Sends tokens to another layout and back, twice."""
    group, world = SequenceGroup.from_group(), Strategy.parse(values.strategy).world
    source = SequenceLayout.contiguous(TOKENS, world)
    target = SequenceLayout.striped(BlockGrid.uniform(TOKENS, block=16), Strategy.parse(values.strategy))
    way = Redistribution.between(source, target, group, debug=values.settings.get("debug", False))
    tokens = torch.randn(source.shard, values.head_dim, dtype=getattr(torch, values.dtype))
    worst, (_, positions) = 0.0, source.tokens_at(group.rank)
    for call in range(CALLS):
        worst = max(worst, largest_difference(way.back(way.there(tokens))[positions], tokens[positions]))
        print(DONE, call, flush=True)
    return worst


PROGRAMS: dict[str, Callable[[Values], float]] = {
    "attention": attention,
    "session": session,
    "transformer": transformer,
    "redistribution": redistribution,
}
"""Each returns the largest absolute error on this rank."""


def _mask_file(values: Values, rank: int) -> str:
    """Writes a file of this rank's own, which is allowed; but their content must be one."""
    grid, path = BlockGrid(math.prod(values.thw), 0, 16, 16, values.thw), f"masks{rank}.safetensors"
    bits = torch.rand(values.heads, grid.nq, grid.nk, generator=torch.Generator().manual_seed(values.mask_seed)) < 0.5
    save_mask(path, [BlockMask(bits, grid)] * 2)
    if values.mask_file == "vanished":
        os.unlink(path)
    if values.mask_file == "truncated":
        os.truncate(path, os.path.getsize(path) // 2)
    return path


def _flip_predicted_masks() -> None:
    predict = SpargeSource.mask

    def flipped(*arguments: Any) -> BlockMask:
        mask = predict(*arguments)
        return BlockMask(~mask.bits, mask.grid)

    SpargeSource.mask = flipped  # type: ignore[method-assign]


def _inputs(
    values: Values, layout: SequenceLayout, rank: int, draws: torch.Generator, size: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Draws q, k and v of all tokens. Returns them, this rank's shards, its tokens and their positions there."""
    shape = values.batch, values.heads, layout.tokens, values.head_dim
    full = [torch.randn(shape, generator=draws, dtype=getattr(torch, values.dtype)) * size for _ in range(3)]
    local, mine, positions = shards(full, layout, rank, padded=True)
    local = [F.pad(one, (0, 0, 0, values.extra)) for one in local]
    if not values.finite:
        local[1][0, 0, 0, 0] = torch.nan
    return full, local, mine, positions


@dataclass(frozen=True)
class Ranks:
    """world: ranks;  odd: what the odd rank is given instead, by field of `Values`;  version: package that it has
    another version of"""

    program: str
    world: int
    values: Values
    injection: Injection | None = None
    odd_rank: int = 0
    odd: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


def be_a_rank(ranks: Ranks, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    if ranks.injection is not None:
        ranks.injection.arm(rank, folder)
    values = ranks.values
    if rank == ranks.odd_rank:
        values = replace(values, **ranks.odd)
        if ranks.version is not None:
            _have_another_version_of(ranks.version)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_S), ranks.world, rank)
    error = PROGRAMS[ranks.program](values)
    (folder / f"result{rank}").write_text(repr(error), encoding="utf-8")
    dist.destroy_process_group()


def _have_another_version_of(package: str) -> None:
    real = metadata.version

    def version(name: str) -> str:
        return "0.0.1+other" if name == package else real(name)

    metadata.version = version
    for module in list(sys.modules.values()):
        if getattr(module, "version", None) is real:
            module.version = version  # type: ignore[attr-defined]
