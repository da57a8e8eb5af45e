"""What the workers run: ranks on nodes that each has been told of in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest import mock

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import node_fingerprints, number_nodes
from tests.core.runtime.session_cases import Session

THW = (4, 12, 16)
MASK = {"source": "synthetic", "block_q": 16, "block_k": 16, "density": 0.3}


def nodes(rank: int, world: int, told: Sequence[Mapping[str, str]], hosts: Sequence[str]) -> tuple[int, ...]:
    with (
        mock.patch.dict("os.environ", told[rank]),
        mock.patch("socket.gethostname", return_value=hosts[rank]),
    ):
        group = SequenceGroup.from_group()
        return number_nodes(group, group.control().gather_integers(node_fingerprints()))


def attention(rank: int, world: int, told: Sequence[Mapping[str, str]]) -> tuple[float, int]:
    """(largest difference from one process, fingerprint of the plan) of a session's first attention"""
    with mock.patch.dict("os.environ", told[rank]):
        session = Session({"mask": MASK}, "auto")  # chosen by the nodes
        worst = session.attend(900.0, thw=THW)
    return worst, session.inner.records[0].fingerprint
