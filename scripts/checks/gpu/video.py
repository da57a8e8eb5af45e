"""Step 8: a denoising by a transformer of real size with random weights, balanced against unbalanced.

On one GPU ranks cannot run side by side. So each rank's work is run alone, one rank after another: `AloneRank` answers
its exchanges at once with buffers of the right size. The sum over calls of the slowest rank's attention is then what a
lockstep of all ranks would take, without communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from dbsp_core import SequenceGroup, Strategy
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from scripts.checks.gpu.clock import Timeline
from scripts.checks.gpu.journal import Case, Row
from scripts.checks.gpu.model import Transformer, random_transformer
from scripts.checks.gpu.setting import Setting

PLANNERS = ("contiguous", "dbsp")


class AloneRank(SequenceGroup):
    """One rank of several without the others: what it receives has the right size, and no meaning."""

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        return PendingTransfer(sent.new_zeros(sum(receive_splits), *sent.shape[1:]), sent, ())

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [mine] * self.size

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine] * self.size)


def cases(setting: Setting) -> Iterator[Case]:
    strategies = ("U1R2",) if setting.simulated else ("U2R1", "U1R2") if setting.dry else ("U8R1", "U2R4")
    for strategy in strategies:
        yield Case(f"each rank alone, {strategy}", partial(each_rank_alone, setting, strategy))
    yield Case("one rank, dense by SDPA", partial(dense_on_one, setting))


def each_rank_alone(setting: Setting, strategy: str) -> Iterator[Row]:
    """Times attention of the slowest rank, call by call, under both planners."""
    model = transformer_of(setting)
    slowest, steps = {}, {}
    for planner in PLANNERS:
        ranks = [AloneRank(rank, setting.world) for rank in range(setting.world)]
        timed = [denoise(setting, model, group, strategy, planner) for group in ranks]
        calls = list(zip(*(attentions for attentions, _ in timed), strict=True))
        slowest[planner] = sum(map(max, calls))
        mean = sum(map(sum, calls)) / setting.world
        steps[planner] = max(total for _, total in timed) / setting.steps
        yield Row(f"{planner}: attention of the slowest rank, sum over calls", slowest[planner], "ms")
        yield Row(f"{planner}: the same / mean of ranks (time, not blocks)", slowest[planner] / mean)
        yield Row(f"{planner}: a step on the slowest rank, no communication", steps[planner], "ms")
    unbalanced, balanced = PLANNERS
    yield Row("attention, unbalanced / balanced", slowest[unbalanced] / slowest[balanced], goal="≥ 1.05")
    yield Row("step, unbalanced / balanced", steps[unbalanced] / steps[balanced])


def transformer_of(setting: Setting) -> Transformer:
    sizes = setting.layers, setting.heads, setting.head_dim, setting.ffn
    return random_transformer(*sizes, setting.device, setting.dtype)


def denoise(
    setting: Setting, model: Transformer, group: SequenceGroup, strategy: str, planner: str
) -> tuple[list[float], float]:
    """Denoises on one rank. Returns the milliseconds of each attention, and of all steps, after one to warm up."""
    blocks = {"block_q": 32, "block_k": 16} if setting.dry else {"block_q": 128, "block_k": 64}
    mask = {"source": "synthetic", "preset": "wan2.1-t2v-14b", "density": 0.4, **blocks}
    config = DbspConfig.load({"mask": mask, "planner": planner})
    session = AttentionSession(config, group, Strategy.parse(strategy), setting.heads, setting.layers)
    video, timeline = Video(setting.thw), Timeline(setting.device)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        timeline.record()
        out = session.attend(layer, q, k, v)
        timeline.record()
        return out

    shard = session.begin(video, timestep=1000.0, device=setting.device).shard
    x, text = tokens_and_text(setting, shard)
    with torch.no_grad():
        for step in range(setting.steps + 1):
            if step == 1:
                timeline.restart()
            if step:
                session.begin(video, timestep=1000.0 - step, device=setting.device)
            x = x - model(x, text, attend) / setting.steps
            session.end()
    total, times = timeline.total(), timeline.between()
    session.flush()
    return times[::2], total


def dense_on_one(setting: Setting) -> Iterator[Row]:
    """Times a step of the whole video on one GPU with dense attention: what db-SP divides."""
    model, timeline = transformer_of(setting), Timeline(setting.device)
    x, text = tokens_and_text(setting, math.prod(setting.thw))
    with torch.no_grad():
        for _warm in range(2):
            timeline.restart()
            out = model(x, text, lambda layer, q, k, v, gate: F.scaled_dot_product_attention(q, k, v))
        yield Row("a step", timeline.total(), "ms")
    yield Row("numbers that are not finite", float((~out.isfinite()).sum()), "", 0.0)


def tokens_and_text(setting: Setting, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws hidden states [1, tokens, H · D] and text [1, 512, H · D]."""
    options = {"device": setting.device, "dtype": setting.dtype}
    width = setting.heads * setting.head_dim
    return torch.randn(1, tokens, width, **options), torch.randn(1, 512, width, **options)
