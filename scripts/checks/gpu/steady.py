"""A steady call of one rank without the others, on the device and the host; each rank of a plan, one after another.

Kernel by kernel, by torch's profiler; `scripts.bench.steady_call` counts launches and Python without a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from dbsp_core import Strategy
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources.synthetic.source import SyntheticSource
from scripts.bench.alone_rank import AloneRank
from scripts.checks.gpu.clock import Timeline
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.setting import Model, Setting

LAYERS = 2  # attentions in each call of a transformer: few, as each has a mask that the host makes
PARTS = {
    "forward_kernel": "attention",
    "copy_kernel": "packing and unpacking",
    "expand_kernel": "tables",
    "pack_kernel": "tables",
    "position_kernel": "order of rows",
    "items_kernel": "order of rows",
    "key_kernel": "order of rows",
    "merge_kernel": "merging",
    "merge_parts_kernel": "merging",
    "quantise_kernel": "packing and unpacking",
    "rotate_kernel": "packing and unpacking",
    "sum_kernel": "prediction",
    "pool_kernel": "prediction",
    "score_kernel": "prediction",
    "select_kernel": "prediction",
}
"""What our kernels do; torch's own are "torch", and copies and fills of memory."""


def cases(setting: Setting) -> Iterator[Case]:
    for model in dict.fromkeys((setting.large, setting.small)):
        for strategy in setting.strategies:
            for name, mask in masks(setting).items():
                case = partial(steady_call, setting, model, strategy, mask)
                yield Case(f"{model.name}, {strategy}, {name}", case, alone=True)


def masks(setting: Setting) -> dict[str, dict[str, Any]]:
    """Returns settings of a mask that is known, and of one that is predicted at each call, both of density 0.4."""
    blocks = {"block_q": 32, "block_k": 16} if setting.dry else {"block_q": 128, "block_k": 64}
    static = {"source": "synthetic", "preset": "wan2.1-t2v-14b", "density": 0.4, **blocks}
    predicted = {"source": "sparge", "topk": 0.4, "similarity": -1.0, **blocks}
    return {"static": static} if setting.simulated else {"static": static, "predicted": predicted}


class SteadyCall:
    """A transformer's call of `LAYERS` attentions on rank 0; one call is one denoising step."""

    def __init__(self, setting: Setting, model: Model, strategy: str, mask: dict[str, Any], rank: int = 0) -> None:
        self.setting, self.video, self.step = setting, Video(model.thw), itertools.count()
        group = AloneRank(rank, setting.world)
        config = DbspConfig.load({"mask": mask})
        self.session = AttentionSession(config, group, Strategy.parse(strategy), model.heads, LAYERS)
        shard = self.begin().shard
        self.session.end()
        size = 1, model.heads, shard, model.head_dim
        self.q, self.k, self.v = (torch.randn(size, device=setting.device).to(setting.dtype) for _ in range(3))

    def begin(self) -> Any:
        return self.session.begin(self.video, timestep=1000.0 - next(self.step), device=self.setting.device)

    def attend(self, layer: int = 0) -> torch.Tensor:
        return self.session.attend(layer, self.q, self.k, self.v)

    def __call__(self, i: int = 0) -> None:
        self.begin()
        for layer in range(LAYERS):
            self.attend(layer)
        self.session.end()


@torch.no_grad()
def steady_call(setting: Setting, model: Model, strategy: str, mask: dict[str, Any]) -> Iterator[Row]:
    call = SteadyCall(setting, model, strategy, mask)
    for _warm_up in range(3):
        call()
    # 1. Of one attention, its share of begin and end included.
    yield Row("on the device", setting.sampler.medians({"": call})[""] / LAYERS, "ms")
    yield Row("on the host", setting.sampler.cpu_ms(call) / LAYERS, "ms")
    # 2. Kernel by kernel.
    if setting.device == "cuda" and not setting.simulated:
        for part, (ms, launches) in profiled(call).items():
            yield Row(f"of it {part}", ms / LAYERS, "ms")
            yield Row(f"launches of {part}", launches / LAYERS)
    # 3. What it attended to, which milliseconds without it would not say of a predicted mask.
    plans = call.session.records.values()
    yield Row("density", sum(plan.density for plan in plans) / len(plans))


def profiled(call: SteadyCall) -> dict[str, tuple[float, int]]:
    """Returns the device's milliseconds and the launches of one call, by part."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    parts: dict[str, tuple[float, int]] = {}
    for event in seen.key_averages():
        if not event.self_device_time_total:  # a call of CUDA's, on the host
            continue
        part = next((part for name, part in PARTS.items() if name in event.key), "torch")
        ms, launches = parts.get(part, (0.0, 0))
        parts[part] = ms + event.self_device_time_total / 1e3, launches + event.count
    return parts


PLANNERS = ("contiguous", "dbsp")
"""Each rank of a plan alone: ranks run one after another, without the exchange. At each call all would wait for the
slowest: the sum of that over calls, over the sum of means, is what imbalance costs in time, not blocks."""


def balance_cases(setting: Setting) -> Iterator[Case]:
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
