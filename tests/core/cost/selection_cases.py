"""What the workers run: a session that chooses its strategies."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.process import log


def choose_together(rank: int, world: int, settings: dict[str, Any], odd: int = -1) -> list[str]:
    """Two layers of synthetic masks. returns: their strategies

    {} in the hardware's name represents 1 on rank `odd` and 0 on the others
    """
    hardware = settings["machine"].format(int(rank == odd))
    mask = {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}
    config = DbspConfig.load({**settings, "machine": hardware, "mask": mask, "strategy": "auto"})
    session = AttentionSession(config, SequenceGroup.from_group(), config.strategy_or(None), heads=5, layers=2)
    try:
        layout = session.begin(Video((3, 8, 8)))
        q = torch.ones(1, 5, layout.shard, 16)
        for layer in range(2):
            session.attend(layer, q, q, q)
    finally:
        dist.barrier()
    return [str(plan.strategy) for plan in session.records.values()]


def choose_unmeasured(rank: int, world: int, cache: str) -> tuple[list[str], list[str]]:
    """The strategies of two layers without a cost model, and what the log says of costs.

    {} in the cache's name represents the rank.
    """
    said: list[str] = []
    config = DbspConfig.load(
        {"mask": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}, "strategy": "auto"}
    )
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache.format(rank)}),
        mock.patch.object(log, "info", lambda text, *values: said.append(text % values)),
    ):
        session = AttentionSession(config, SequenceGroup.from_group(), None, heads=5, layers=2)
        try:
            q = torch.ones(1, 5, session.begin(Video((3, 8, 8))).shard, 16)
            for layer in range(2):
                session.attend(layer, q, q, q)
        finally:
            dist.barrier()
    strategies = [str(plan.strategy) for plan in session.records.values()]
    return strategies, [line for line in said if line.startswith("costs")]
