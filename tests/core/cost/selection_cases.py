"""What the workers run: a session that chooses its strategies."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from dbsp_core import SequenceGroup
from dbsp_core.config.config import DbspConfig
from dbsp_core.cost import free_memory
from dbsp_core.cost.latency import AttentionShape
from dbsp_core.cost.peak_memory import peak_bytes
from dbsp_core.masks.video import Video
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.log import log


def choose_together(
    rank: int, world: int, settings: dict[str, Any], odd: int = -1
) -> tuple[list[str], dict[str, int]]:
    """Two layers of synthetic masks. returns: their strategies, and how often each was chosen.

    {} in the hardware's name stands for 1 on rank `odd` and 0 on the others
    """
    hardware = settings["cost_model"].format(int(rank == odd))
    mask = {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}
    config = DbspConfig.load({**settings, "cost_model": hardware, "mask": mask, "strategy": "auto"})
    session = AttentionSession(config, SequenceGroup.of(), config.strategy_or(None), heads=5, layers=2)
    try:
        layout = session.begin(Video((3, 8, 8)))
        q = torch.ones(1, 5, layout.shard, 16)
        for layer in range(2):
            session.attend(layer, q, q, q)
    finally:
        dist.barrier()
    chosen = {str(strategy): count for strategy, count in session.chosen.items()}
    return [str(plan.strategy) for plan in session.records.values()], chosen


def choose_unmeasured(rank: int, world: int, cache: str) -> tuple[list[str], list[str]]:
    """The strategies of two layers without a cost model, and what the log says of costs.

    {} in the cache's name stands for the rank.
    """
    said: list[str] = []
    config = DbspConfig.load(
        {"mask": {"source": "synthetic", "density": 0.4, "block_q": 8, "block_k": 8}, "strategy": "auto"}
    )
    with (
        mock.patch.dict("os.environ", {"XDG_CACHE_HOME": cache.format(rank)}),
        mock.patch.object(log, "info", lambda text, *values: said.append(text % values)),
    ):
        session = AttentionSession(config, SequenceGroup.of(), None, heads=5, layers=2)
        try:
            q = torch.ones(1, 5, session.begin(Video((3, 8, 8))).shard, 16)
            for layer in range(2):
                session.attend(layer, q, q, q)
        finally:
            dist.barrier()
    strategies = [str(plan.strategy) for plan in session.records.values()]
    return strategies, [line for line in said if line.startswith("costs")]


def plans_within(
    rank: int,
    world: int,
    settings: dict[str, Any],
    free: dict[int, int],
    heads: int = 5,
    batches: tuple[int, ...] = (1,),
) -> tuple[list[tuple[str, float, int]], list[str]]:
    """Two layers of synthetic masks under a memory limit, in batches of these sizes one after another.

    free: bytes that "auto" finds, by rank
    returns: of each layer in the last batch the strategy, the largest peak in bytes, and the most heads of a Ulysses
             rank; and warnings
    """
    mask = {"source": "synthetic", "density": 0.4, "spread": 0.9, "block_q": 8, "block_k": 8}
    config = DbspConfig.load({"mask": mask, "cost_model": "a800", **settings})
    session = AttentionSession(config, SequenceGroup.of(), config.strategy_or(None), heads=heads, layers=2)
    told: list[str] = []
    logger, handler = logging.getLogger("dbsp"), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        with mock.patch.object(free_memory, "free_memory", return_value=free.get(rank, 2**40)):
            for batch in batches:
                layout = session.begin(Video((3, 8, 8)))
                q = torch.ones(batch, heads, layout.shard, 16)
                for layer in range(2):
                    session.attend(layer, q, q, q)
    finally:
        logger.removeHandler(handler)
        dist.barrier()
    shape = AttentionShape(batches[-1], heads, layout.tokens, 16, 4)
    plans = [plan.assignment for plan in session.records.values()]
    peaks = [float(peak_bytes(plan, shape, layout).max()) for plan in plans]
    most = [int(plan.head_ulysses_ranks.sum(axis=0).max()) for plan in plans]
    return list(zip([str(plan.strategy) for plan in plans], peaks, most, strict=True)), told
