"""Sessions and attentions that one rank alone cannot have are rejected on all ranks at once, so that none waits."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS
from tests.support.settings import session_of

HEADS = 4
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}


def rejected_session(rank: int, world: int, settings: dict[str, Any], kernel: str) -> tuple[str, str]:
    """Runs a session whose kernel $DBSP_KERNEL names on rank 1 alone. Returns the phase that raises, and the error."""
    config = DbspConfig.load({"mask": WINDOW, **settings})
    phase = "making"
    with mock.patch.dict(os.environ, {"DBSP_KERNEL": kernel} if rank == 1 else {}):
        try:
            strategy = config.strategy_or(Strategy(world, 1))
            session = AttentionSession(config, SequenceGroup.from_group(), strategy, HEADS, 1)
            phase = "size"
            layout = session.begin(Video((4, 8, 8)), timestep=900.0)
            phase = "attention"
            session.attend(0, *torch.randn(3, 1, HEADS, layout.shard, 16))
        except UserError as error:
            return phase, str(error)
    return "nowhere", ""


def rejected_later(rank: int, world: int) -> tuple[str, str]:
    """Attends twice in float32 and then in float64, for which rank 1's kernel is broken."""
    session = session_of({"mask": WINDOW, "kernel": "cpu"}, f"U1R{world}", HEADS)

    def why_unsupported(self: Any, device: Any, given: torch.dtype, needs: Any = None) -> str | None:
        return "it is broken here" if rank == 1 and given != torch.float32 else None

    with mock.patch.object(type(KERNELS["cpu"]), "why_unsupported", why_unsupported):
        for dtype in (torch.float32, torch.float32, torch.float64):
            shard = session.begin(Video((4, 8, 8)), timestep=900.0).shard
            q, k, v = torch.randn(3, 1, HEADS, shard, 16, dtype=dtype)
            try:
                session.attend(0, q, k, v)
            except UserError as error:
                return str(dtype), str(error)
    return "nowhere", ""


UNKNOWN, MISSING = "rank(s) [1]: unknown DBSP_KERNEL 'nonsense'", "rank(s) [1]: kernel 'fa4' cannot be used here"
BLOCKS = "rank(s) [1]: kernel 'fa4' does not support this plan: it supports blocks of 128×128, 256×128 "
OF_FA4 = {"mask": WINDOW | {"block_q": 128, "block_k": 128}}


@pytest.mark.parametrize(
    ("function", "arguments", "phase", "reason"),
    [
        (rejected_session, ({"strategy": "auto"}, "nonsense"), "making", UNKNOWN),
        (rejected_session, ({}, "fa4"), "making", BLOCKS),
        (rejected_session, (OF_FA4 | {"strategy": "auto"}, "fa4"), "attention", MISSING),
        (rejected_session, (OF_FA4 | {"strategy": "U1R2"}, "fa4"), "attention", MISSING),
        (rejected_later, (), "torch.float64", "rank(s) [1]: kernel 'cpu' cannot be used here: it is broken here"),
    ],
)
def test_kernel_that_one_rank_cannot_use_is_rejected_on_all(pool, function, arguments, phase, reason):
    """Expects an unknown name, and blocks it lacks, to be found when the session is made; a missing kernel later."""
    for found, message in pool(2).run(function, *arguments):
        assert (found, reason in message) == (phase, True), message
