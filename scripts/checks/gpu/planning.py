"""Step 6: the time of prediction, of kernel tables, of plans and of a whole call, for one rank of a 14B model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from dbsp_core import BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange import Route
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.runtime.tables import TableLayout, build_tables, dense_spans_of, table_layout
from dbsp_core.sources import LocalQK, MaskRequest
from dbsp_core.sources.synthetic.source import SyntheticSource
from scripts.checks.gpu.clock import Work
from scripts.checks.gpu.journal import Case, Row
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.video import AloneRank

BLOCKS = {"block_q": 128, "block_k": 64}


def cases(setting: Setting) -> Iterator[Case]:
    blocks = {"block_q": 32, "block_k": 16} if setting.dry else BLOCKS
    for source in ("sparge", "sol", "vsa"):
        options: dict[str, Any] = blocks if source != "vsa" else {}
        yield Case(f"prediction, {source}", partial(prediction, setting, source, options))
    for strategy in (f"U{setting.world}R1", f"U1R{setting.world}"):
        for mask in ({"source": "synthetic", "density": 0.4}, {"source": "sparge"}):
            name = f"a steady call, {mask['source']}, {strategy}"
            yield Case(name, partial(steady_call, setting, strategy, mask | blocks))
        for planner in ("dbsp", "contiguous"):
            yield Case(f"{planner}, {strategy}", partial(planning, setting, strategy, planner, blocks))


def on_device_and_host(setting: Setting, what: str, work: Work) -> Iterator[Row]:
    yield Row(what, setting.sampler.medians({"": work})[""], "ms")
    yield Row(f"{what}, on the host", setting.sampler.cpu_ms(work), "ms")


def prediction(setting: Setting, name: str, options: dict[str, Any]) -> Iterator[Row]:
    """Times the prediction of a rank's heads: pooling, scores and choosing, without communication."""
    source = DbspConfig.load({"mask": {"source": name, **options}}).mask
    shape = 1, setting.own_heads, setting.tokens, setting.head_dim
    # Neighbouring tokens are equal, or every block would be dense for its dissimilarity.
    q, k = ((torch.randn(shape, device=setting.device).cumsum(2) / 30).to(setting.dtype) for _ in range(2))
    request = MaskRequest(0, setting.own_heads, setting.thw)

    def predict(i: int) -> BlockMask:
        return source.mask(request, LocalQK.alone(q, k))

    yield from on_device_and_host(setting, "mask", predict)
    yield Row("density", predict(0).density)


def steady_call(setting: Setting, strategy: str, mask: dict[str, Any]) -> Iterator[Row]:
    """Times a layer's call on rank 0 of several without the others: on the device, and on the CPU that launches it."""
    config = DbspConfig.load({"mask": mask})
    group = AloneRank(0, setting.world)
    session = AttentionSession(config, group, Strategy.parse(strategy), setting.heads, 1)
    step = itertools.count()

    def call(i: int) -> torch.Tensor:
        session.begin(Video(setting.thw), timestep=1000.0 - next(step), device=setting.device)
        out = session.attend(0, q, k, v)
        session.end()
        return out

    shard = session.begin(Video(setting.thw), timestep=1001.0, device=setting.device).shard
    shape = 1, setting.heads, shard, setting.head_dim
    q, k, v = ((torch.randn(shape, device=setting.device).cumsum(2) / 30).to(setting.dtype) for _ in range(3))
    with torch.no_grad():
        yield from on_device_and_host(setting, "a call", call)
    session.flush()


def _part(plan: Plan, layout: SequenceLayout, device: torch.device) -> tuple[Route, TableLayout]:
    """Makes what rank 0 needs for any mask under a plan, on the device."""
    cpu = torch.device("cpu")
    return build_route(plan, layout, 0, layout.shard, cpu).to(device), table_layout(plan, 0).to(device)


def planning(setting: Setting, strategy: str, planner: str, blocks: dict[str, int]) -> Iterator[Row]:
    """Times a plan of all heads, a rank's part of it, and the tables of a mask under it."""
    source = SyntheticSource(preset="wan2.1-t2v-14b", density=0.4, **blocks)
    mask = source.mask(MaskRequest(0, setting.heads, setting.thw))
    plan = make_plan(mask, strategy, planner)
    yield Row("ρ_s", plan.rho)
    yield Row("plan, on the host", setting.sampler.cpu_ms(lambda i: make_plan(_copy(mask), strategy, planner)), "ms")
    layout = SequenceLayout.contiguous(setting.tokens, setting.world)
    device = torch.device(setting.device)
    yield Row("a rank's part, on the host", setting.sampler.cpu_ms(lambda i: _part(plan, layout, device)), "ms")
    _, tables_layout = _part(plan, layout, device)
    there = BlockMask(mask.bits.to(device), mask.grid)

    def tables(i: int) -> object:
        return [one.expanded() for one in build_tables(tables_layout, there, dense_spans_of(there, device))]

    yield from on_device_and_host(setting, "tables", tables)


def _copy(mask: BlockMask) -> BlockMask:
    """Copies the mask without what was counted of it."""
    return BlockMask(mask.bits.clone(), mask.grid)
