"""The paper's claim on one GPU: each rank of a plan alone, split contiguously against balanced.

On one GPU ranks cannot run side by side, so they run one after another, without the exchange. At each call all would
wait for the slowest: the sum of that over calls, over the sum of means, is what imbalance costs in time, not blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from functools import partial
from unittest import mock

import torch

from dbsp_core import Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources.synthetic.source import SyntheticSource
from scripts.bench.alone_rank import AloneRank
from scripts.checks.gpu.clock import Timeline
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.steady import masks

PLANNERS = ("contiguous", "dbsp")


def cases(setting: Setting) -> Iterator[Case]:
    for strategy in setting.strategies:
        yield Case(f"14B, density 0.4, {strategy}", partial(each_rank_alone, setting, strategy), 120, alone=True)


@torch.no_grad()
def each_rank_alone(setting: Setting, strategy: str) -> Iterator[Row]:
    """Times every attention of every rank under both planners."""
    slowest = {}
    masks_made_once = mock.patch.object(SyntheticSource, "mask", functools.cache(SyntheticSource.mask))
    for planner in PLANNERS:
        # 1. Milliseconds by rank and call. All ranks have the same masks, which take a second each on the host.
        with masks_made_once:
            ms = torch.tensor([attentions(setting, strategy, planner, rank) for rank in range(setting.world)])
        # 2. The slowest rank of each call, and the mean.
        slowest[planner], mean = float(ms.amax(0).sum()), float(ms.mean(0).sum())
        yield Row(f"{planner}: attention of the slowest rank, a call", slowest[planner] / ms.shape[1], "ms")
        goal = "≤ 1.05" if planner == "dbsp" else ""
        yield Row(f"{planner}: slowest / mean, in time", slowest[planner] / mean, goal=goal)
    yield Row("contiguous / dbsp", slowest["contiguous"] / slowest["dbsp"], goal="≥ 1.05")


def attentions(setting: Setting, strategy: str, planner: str, rank: int) -> list[float]:
    """Returns the milliseconds of each attention on one rank, but for the first step's."""
    model, timeline = setting.large, Timeline(setting.device)
    config = DbspConfig.load({"mask": masks(setting)["static"], "planner": planner})
    group = AloneRank(rank, setting.world)
    session = AttentionSession(config, group, Strategy.parse(strategy), model.heads, setting.layers)
    q = k = v = None
    for step in range(setting.steps + 1):
        shard = session.begin(Video(model.thw), timestep=1000.0 - step, device=setting.device).shard
        if q is None or step == 1:
            size = 3, 1, model.heads, shard, model.head_dim
            q, k, v = torch.randn(size, device=setting.device, dtype=setting.dtype)
            timeline.restart()
        for layer in range(setting.layers):
            timeline.record()
            session.attend(layer, q, k, v)
            timeline.record()
        session.end()
    timeline.wait()
    session.flush()
    return timeline.between()[::2]
