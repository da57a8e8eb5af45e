"""On which node each rank is, which every rank has to see identically: plans depend on it."""

from __future__ import annotations

import pytest

from tests.core.comm.node_cases import attention, nodes

ONE_HOST, TWO_HOSTS = ["here"] * 4, ["here", "there"] * 2
UNLIKE = [{"LOCAL_WORLD_SIZE": size} for size in ("3", "3", "3", "1")]
TORCHRUN = [one | {"GROUP_RANK": agent} for one, agent in zip(UNLIKE, "0001", strict=True)]


@pytest.mark.parametrize(
    ("told", "hosts", "expected"),
    [
        ([{"LOCAL_WORLD_SIZE": "2"}] * 4, TWO_HOSTS, (0, 0, 1, 1)),
        ([{"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "7"}] * 4, TWO_HOSTS, (0, 0, 0, 0)),
        (TORCHRUN, ONE_HOST, (0, 0, 0, 1)),
        (UNLIKE, ONE_HOST, (0, 0, 0, 0)),
        (UNLIKE, TWO_HOSTS, (0, 1, 0, 1)),
        ([{"GROUP_RANK": "0"}, {}, {}, {}], ONE_HOST, (0, 0, 0, 0)),
        ([{}] * 4, TWO_HOSTS, (0, 1, 0, 1)),
        ([{"LOCAL_WORLD_SIZE": text} for text in ("0", "-1", "two", "")], TWO_HOSTS, (0, 1, 0, 1)),
    ],
)
def test_all_ranks_see_the_same_nodes(pool, told, hosts, expected):
    assert pool(4).run(nodes, told, hosts) == [expected] * 4


@pytest.mark.parametrize("told", [UNLIKE, TORCHRUN, [{"LOCAL_WORLD_SIZE": "0"}] * 4], ids=["by hand", "torchrun", "0"])
def test_nodes_with_unlike_numbers_of_ranks_plan_identically(pool, told):
    found = pool(4).run(attention, told)
    assert max(difference for difference, _ in found) <= 1e-5
    assert len({plan for _, plan in found}) == 1
