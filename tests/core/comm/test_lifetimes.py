"""Process groups end when torch destroys them, whatever of db-SP is still in scope: a group that is left when Python
ends may abort it."""

from __future__ import annotations

import pytest

from tests.core.comm.lifetime_cases import (
    PREDICTED,
    caught,
    executor,
    gathered,
    jobs,
    loss_after_backward,
    loss_before_backward,
    outside,
    parts,
    redistribution,
    session,
    timeouts_of_auxiliary_groups,
    unequal_numbers_of_groups,
    use_after_the_end,
)
from tests.core.comm.lifetimes import left_alive
from tests.support.workers import assert_all_raise

WINDOW = {"source": "window", "window": [1, 3, 3], "block_q": 16, "block_k": 16}


@pytest.mark.parametrize(
    ("groups", "use", "args"),
    [
        (1, loss_after_backward, ()),
        (1, loss_before_backward, ()),
        (1, executor, ()),
        (1, redistribution, ()),
        (1, gathered, ()),
        (2, session, (WINDOW,)),
        (2, session, (PREDICTED,)),
        (2, caught, ()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_nothing_keeps_a_destroyed_group_alive(pool, tmp_path, groups, use, args):
    """groups: that there are while it is used, ours next to torch's among them"""
    for there, left in pool(2).run(left_alive, str(tmp_path), use, *args):
        assert (there, left) == (groups, [])


@pytest.mark.parametrize("what", ["executor", "backward"])
def test_what_is_used_once_its_group_is_destroyed_says_so(pool, what):
    assert_all_raise(pool, 2, "the process group that this was made for is destroyed", use_after_the_end, what)


def test_a_group_for_each_job_leaves_nothing(pool):
    for (groups, descriptors), *later in pool(2).run(jobs, 4):
        assert all(one[0] == groups for one in later), later
        assert max(one[1] for one in later) <= descriptors + 2, "gloo closes its own when it gets to it"


def test_ranks_may_have_unequal_numbers_of_groups(pool):
    assert pool(2).run(unequal_numbers_of_groups) == [[[0], [1]] * 2] * 2


def test_a_rank_outside_the_group_is_told(pool):
    *inside, last = pool(3).run(outside)
    assert set(inside) == {""}
    assert last.startswith("UserError: this rank is outside the process group")


def test_auxiliary_groups_have_their_group_s_timeout(pool):
    assert pool(4).run(timeouts_of_auxiliary_groups, 77.0) == [[77.0] * 4] * 4


def test_a_part_of_a_group_is_a_group_of_its_own_and_goes_with_it(pool):
    alone, *inside = pool(4).run(parts, 1, 3)
    assert inside == [([1, 2, 3], [1, 2, 3], True)] * 3
    assert alone[:2] == ([0], [0])
