"""What the workers run: whatever a user may still hold when process groups are destroyed."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    dual_balanced_attention,
    make_plan,
)
from dbsp_core.comm.groups import gather_shards
from dbsp_core.comm.redistribution import Redistribution
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from tests.core.comm.lifetimes import count

TOKENS, HEADS, WIDTH = 64, 2, 8
MASK = BlockMask(torch.ones(HEADS, 4, 4, dtype=torch.bool), BlockGrid.uniform(tokens=TOKENS, block=16))
PREDICTED = {"source": "sparge", "cdf": 0.5, "block_q": 16, "block_k": 16}


def qkv(gradients: bool = False) -> torch.Tensor:
    shard = TOKENS // dist.get_world_size()
    return torch.randn(1, HEADS, shard, WIDTH, requires_grad=gradients)


def loss_after_backward() -> torch.Tensor:
    q = qkv(gradients=True)
    loss = dual_balanced_attention(q, q, q, MASK, "U1R2").sum()
    loss.backward()
    return loss


def loss_before_backward() -> torch.Tensor:
    q = qkv(gradients=True)
    return dual_balanced_attention(q, q, q, MASK, "U2R1").sum()


def executor() -> DualBalancedAttention:
    layout = SequenceLayout.contiguous(TOKENS, dist.get_world_size())
    attend = DualBalancedAttention.prepare(
        make_plan(MASK, "U1R2", layout=layout), MASK, layout, SequenceGroup.from_group()
    )
    attend(*[qkv()] * 3)
    return attend


def session(source: dict[str, Any], group: SequenceGroup | None = None) -> AttentionSession:
    """After two steps. Predicted masks are planned for in a thread."""
    made = AttentionSession(
        DbspConfig.load({"mask": source}), group or SequenceGroup.from_group(), Strategy(1, 2), HEADS, 1
    )
    for step in range(2):
        shard = made.begin(Video((1, 8, 8)), timestep=900.0 - step).shard
        made.attend(0, *[torch.randn(1, HEADS, shard, WIDTH)] * 3)
    return made


def redistribution() -> tuple[Redistribution, torch.Tensor]:
    whole = SequenceLayout.whole_sequences([TOKENS // 2] * 2, [0, 1], 2)
    way = Redistribution.between(whole, SequenceLayout.contiguous(TOKENS, 2))
    return way, way.there(torch.randn(TOKENS // 2, 3, requires_grad=True)).sum()


def gathered() -> torch.Tensor:
    return gather_shards(torch.ones(2, 2, requires_grad=True), 0, SequenceGroup.from_group())


def caught() -> Exception:
    """An error with its traceback, and all that was in scope there."""
    try:
        AttentionSession(DbspConfig.load({"mask": PREDICTED}), SequenceGroup.from_group(), Strategy(3, 1), HEADS, 1)
    except ValueError as error:
        return error
    raise AssertionError("three ranks were accepted for two")


def use_after_the_end(rank: int, world: int, what: str) -> None:
    group = dist.new_group(list(range(world)))
    if what == "executor":
        layout = SequenceLayout.contiguous(TOKENS, world)
        plan, ranks = make_plan(MASK, "U1R2", layout=layout), SequenceGroup.from_group(group)
        attend = DualBalancedAttention.prepare(plan, MASK, layout, ranks)
        attend(*[qkv()] * 3)
    else:
        q = qkv(gradients=True)
        loss = dual_balanced_attention(q, q, q, MASK, "U1R2", group=SequenceGroup.from_group(group)).sum()
    dist.destroy_process_group(group)
    del group
    if what == "executor":
        attend(*[qkv()] * 3)
    else:
        loss.backward()


def jobs(rank: int, world: int, number: int) -> list[tuple[int, int]]:
    """A process group for each, destroyed after it. Returns after each, how many groups and descriptors there are."""
    found = []
    for _ in range(number):
        group = dist.new_group(list(range(world)))
        ranks = SequenceGroup.from_group(group)
        ranks.auxiliary("reports")
        session(PREDICTED, ranks).flush()
        dist.destroy_process_group(group)
        del group, ranks
        found.append(_settled())
    return found


def _settled() -> tuple[int, int]:
    """Descriptors close when gloo's threads get to it."""
    now = count()
    for _ in range(50):
        time.sleep(0.02)
        before, now = now, count()
        if before == now:
            break
    return now


def unequal_numbers_of_groups(rank: int, world: int) -> list[list[int]]:
    """A rank has a group more than the others, and one is destroyed between the making of two next to one group."""
    own = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=60))
    passing = dist.new_group(list(range(world)))
    ranks = SequenceGroup.from_group(group)
    found = ranks.control().gather_integers([rank])
    dist.destroy_process_group(passing)
    found += ranks.auxiliary("another").gather_integers([rank])
    dist.destroy_process_group(group)
    if own is not None:
        dist.destroy_process_group(own)
    return found


def outside(rank: int, world: int) -> str:
    """What the last rank is given, which is in no group."""
    group = dist.new_group(list(range(world - 1)))
    try:
        SequenceGroup.from_group(group)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # or the group would go while others connect
        dist.destroy_process_group(group)
    return ""


def timeouts_of_auxiliary_groups(rank: int, world: int, seconds: float) -> list[float | None]:
    """Of those next to a group that was given `seconds`, in seconds."""
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    own = SequenceGroup.from_group(group)
    limits = [one.timeout for one in (own, own.control(), own.auxiliary("reports"), own.part(rank // 2 * 2, 2))]
    dist.destroy_process_group(group)
    return [None if limit is None else limit.total_seconds() for limit in limits]


def parts(rank: int, world: int, first: int, size: int) -> tuple[list[int], list[int], bool]:
    """Ranks of a part by what it gathers, those of its control group, and whether it has ended with its group."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    whole = SequenceGroup.from_group(group)
    part = whole.part(first, size) if first <= rank < first + size else whole.part(rank, 1)
    gathered = [rank for (rank,) in part.gather_integers([rank])]
    inner = part.control().gather_integers([rank])
    assert whole.part(0, world) is whole
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    try:
        ended = part.size > 1 and part.group is None
    except UserError:
        ended = True
    return gathered, [rank for (rank,) in inner], ended
