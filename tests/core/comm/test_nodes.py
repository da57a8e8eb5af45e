"""Nodes of ranks, which every rank has to see identically: plans depend on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

import pytest

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import node_fingerprints, number_nodes


def nodes(rank: int, world: int, variables: Sequence[Mapping[str, str]], hostnames: Sequence[str]) -> tuple[int, ...]:
    with (
        mock.patch.dict("os.environ", variables[rank]),
        mock.patch("socket.gethostname", return_value=hostnames[rank]),
    ):
        group = SequenceGroup.from_group()
        return number_nodes(group, group.control().gather_integers(node_fingerprints()))


ONE_HOSTNAME, TWO_HOSTNAMES = ["here"] * 4, ["here", "there"] * 2
UNLIKE = [{"LOCAL_WORLD_SIZE": size} for size in ("3", "3", "3", "1")]
TORCHRUN = [one | {"GROUP_RANK": agent} for one, agent in zip(UNLIKE, "0001", strict=True)]


@pytest.mark.parametrize(
    ("variables", "hostnames", "expected"),
    [
        ([{"LOCAL_WORLD_SIZE": "2"}] * 4, TWO_HOSTNAMES, (0, 0, 1, 1)),
        ([{"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "7"}] * 4, TWO_HOSTNAMES, (0, 0, 0, 0)),
        (TORCHRUN, ONE_HOSTNAME, (0, 0, 0, 1)),
        (UNLIKE, ONE_HOSTNAME, (0, 0, 0, 0)),
        (UNLIKE, TWO_HOSTNAMES, (0, 1, 0, 1)),
        ([{"LOCAL_WORLD_SIZE": text} for text in ("0", "-1", "two", "")], TWO_HOSTNAMES, (0, 1, 0, 1)),
    ],
)
def test_nodes_are_equal_on_all_ranks(pool, variables, hostnames, expected):
    assert pool(4).run(nodes, variables, hostnames) == [expected] * 4
