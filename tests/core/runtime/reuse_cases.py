"""What the workers run: plans made behind the scenes, which go wrong on one rank."""

from __future__ import annotations

import threading
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceGroup, make_plan
from dbsp_core.runtime.async_plan_cache import AsyncPlanCache

GRID = BlockGrid.uniform(8 * 16, 16)


def mask_of(*work: int, grid: BlockGrid = GRID) -> BlockMask:
    """Heads with so many dense blocks, from the top left on."""
    bits = np.zeros((len(work), grid.nq * grid.nk), dtype=bool)
    for head, dense in zip(bits, work, strict=True):
        head[:dense] = True
    return BlockMask(bits.reshape(-1, grid.nq, grid.nk), grid)


def plan_where_one_rank_goes_wrong(rank: int, world: int, odd: int, fault: str) -> list[int]:
    """Three calls whose masks ask for new plans. Returns fingerprints of the plans they got."""
    cache = AsyncPlanCache(1.0, group=SequenceGroup.of())
    wrong = False

    def make(mask: BlockMask, _current: Plan | None) -> Plan:
        if wrong and fault == "raises":
            raise ZeroDivisionError("no planner today")
        planner = "contiguous" if wrong and fault == "differs" else "snake"
        return make_plan(mask, f"U{world}R1", planner)

    fingerprints = []
    try:
        for call in range(3):
            mask = mask_of(*np.random.default_rng(call).integers(1, 60, 2 * world))
            wrong = wrong or (call == 1 and rank == odd)
            fingerprints.append(cache.plan_for("layer", mask, make).plan.fingerprint)
            dist.all_reduce(torch.ones(1))  # the main group goes on meanwhile
    finally:
        dist.barrier()
    cache.flush()
    return fingerprints


def two_caches_of_one_group(rank: int, world: int) -> list[int]:
    """The first cache's job is late on rank 0, until the second's is queued. Returns the next plans' fingerprints."""
    late, queued = threading.Event(), threading.Event()
    caches = [AsyncPlanCache(1.0, group=SequenceGroup.of()) for _ in range(2)]

    def make(mask: BlockMask, _current: Plan | None) -> Plan:
        if late.is_set() and rank == 0:
            queued.wait(30)  # ends a hang
        return make_plan(mask, f"U{world}R1", "snake")

    first, *later = (mask_of(*np.random.default_rng(seed).integers(1, 60, 2 * world)) for seed in range(3))
    for cache in caches:
        cache.plan_for("layer", first, make)
        cache.flush()
    late.set()
    for cache, mask in zip(caches, later, strict=True):
        cache.plan_for("layer", mask, make)
    queued.set()
    return [cache.plan_for("layer", mask, make).plan.fingerprint for cache, mask in zip(caches, later, strict=True)]


def timeouts(rank: int, world: int, seconds: float) -> list[float]:
    """Of a group with a timeout of its own and of those beside it, as torch has them."""
    group = SequenceGroup.of(dist.new_group(list(range(world)), timeout=timedelta(seconds=seconds)))
    beside = [group, *(group.auxiliary(purpose) for purpose in ("control", "planning", "meeting"))]
    options = [one.group._get_backend(torch.device("cpu")).options for one in beside if one.group is not None]
    found = [one._timeout.total_seconds() for one in options]
    assert group.timeout == timedelta(seconds=seconds)
    return found
