"""Process groups end when torch destroys them, even if db-SP objects are in scope: a group left at exit may abort."""

from __future__ import annotations

import functools
from datetime import timedelta

import pytest
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
from tests.core.comm.lifetimes import left_alive
from tests.support.settings import session_of
from tests.support.workers import assert_all_raise

TOKENS, HEADS, WIDTH = 64, 2, 8
MASK = BlockMask(torch.ones(HEADS, 4, 4, dtype=torch.bool), BlockGrid.uniform(tokens=TOKENS, block=16))
PREDICTED = {"source": "sparge", "cdf": 0.5, "block_q": 16, "block_k": 16}


def qkv(gradients: bool = False) -> torch.Tensor:
    shard = TOKENS // dist.get_world_size()
    return torch.randn(1, HEADS, shard, WIDTH, requires_grad=gradients)


def executor(group: dist.ProcessGroup | None = None) -> DualBalancedAttention:
    """Returns an attention that was called once."""
    layout = SequenceLayout.contiguous(TOKENS, dist.get_world_size())
    plan = make_plan(MASK, "U1R2", layout=layout)
    attend = DualBalancedAttention.prepare(plan, MASK, layout, SequenceGroup.from_group(group))
    attend(*[qkv()] * 3)
    return attend


def everything() -> list[object]:
    """Returns all that may hold a group: graphs, an attention, a session after two steps, and an error."""
    group, q = SequenceGroup.from_group(), qkv(gradients=True)
    loss = dual_balanced_attention(q, q, q, MASK, "U1R2").sum()
    loss.backward()
    whole = SequenceLayout.whole_sequences([TOKENS // 2] * 2, [0, 1], 2)
    way = Redistribution.between(whole, SequenceLayout.contiguous(TOKENS, 2))
    made = AttentionSession(DbspConfig.load({"mask": PREDICTED}), group, Strategy(1, 2), HEADS, layers=1)
    for step in range(2):
        shard = made.begin(Video((1, 8, 8)), timestep=900.0 - step).shard
        made.attend(0, *[torch.randn(1, HEADS, shard, WIDTH)] * 3)
    with pytest.raises(UserError, match="GPUs") as caught:
        session_of({"mask": PREDICTED}, "U3R1", HEADS)
    there = way.there(torch.randn(TOKENS // 2, 3, requires_grad=True)).sum()
    return [loss, executor(), way, there, gather_shards(torch.ones(2, 2, requires_grad=True), 0, group), made, caught]


def use_after_the_end(rank: int, world: int, what: str) -> None:
    group = dist.new_group(list(range(world)))
    if what == "executor":
        use = functools.partial(executor(group), *[qkv()] * 3)
    else:
        q = qkv(gradients=True)
        use = dual_balanced_attention(q, q, q, MASK, "U1R2", group=group).sum().backward
    dist.destroy_process_group(group)
    del group
    use()


def outside(rank: int, world: int) -> str:
    """Returns the error of the last rank, which is in no group."""
    group = dist.new_group(list(range(world - 1)))
    try:
        SequenceGroup.from_group(group)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.barrier()  # or the group would go while others connect
        dist.destroy_process_group(group)
    return ""


def parts(rank: int, world: int, first: int, size: int) -> tuple[list[int], list[int], bool]:
    """Returns a part's ranks by what it gathers, those of its control group, and whether it ended with its group."""
    group = dist.new_group(timeout=timedelta(seconds=77))
    whole = SequenceGroup.from_group(group)
    part = whole.part(first, size) if first <= rank < first + size else whole.part(rank, 1)
    gathered = [rank for (rank,) in part.gather_integers([rank])]
    inner = part.control().gather_integers([rank])
    assert whole.part(0, world) is whole
    made = [one for one in (whole, whole.control(), whole.auxiliary("reports"), part) if one.size > 1]
    assert {one.timeout for one in made} == {timedelta(seconds=77)}
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    try:
        ended = part.size > 1 and part.group is None
    except UserError:
        ended = True
    return gathered, [rank for (rank,) in inner], ended


def test_destroyed_group_is_not_kept_alive(pool, tmp_path):
    for there, left in pool(2).run(left_alive, str(tmp_path), everything):
        assert (there, left) == (2, []), "torch's group and one of db-SP's"


@pytest.mark.parametrize("what", ["executor", "backward"])
def test_use_after_the_group_is_destroyed_raises(pool, what):
    assert_all_raise(pool, 2, "the process group was destroyed", use_after_the_end, what)


def test_rank_outside_the_group_raises(pool):
    *inside, last = pool(3).run(outside)
    assert set(inside) == {""}
    assert last.startswith("UserError: this rank is not in the process group")


def test_part_of_a_group_has_its_timeout_and_ends_with_it(pool):
    alone, *inside = pool(4).run(parts, 1, 3)
    assert inside == [([1, 2, 3], [1, 2, 3], True)] * 3
    assert alone[:2] == ([0], [0])
