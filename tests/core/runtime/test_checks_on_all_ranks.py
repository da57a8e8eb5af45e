"""Sessions and attentions that one rank alone cannot have are rejected on all ranks at once, so that none waits."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS
from tests.support.settings import session_of
from tests.support.workers import assert_all_raise

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


def _broken_beyond_float32(rank: int) -> AbstractContextManager[Any]:
    """Makes rank 1's kernels support float32 alone, within a block."""

    def why_unsupported(self: Any, device: Any, given: torch.dtype, needs: Any = None) -> str | None:
        return "it is broken here" if rank == 1 and given != torch.float32 else None

    return mock.patch.object(type(KERNELS["cpu"]), "why_unsupported", why_unsupported)


def rejected_later(rank: int, world: int, with_session: bool) -> tuple[str, str]:
    """Attends twice in float32 and then in float64, for which rank 1's kernel is broken."""
    session = session_of({"mask": WINDOW, "kernel": "cpu"}, f"U1R{world}", HEADS)
    mask, layout = BlockMask.dense(HEADS, BlockGrid.uniform(128, 16)), SequenceLayout.contiguous(128, world)
    plan = make_plan(mask, Strategy(1, world), layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, None, kernel="cpu")
    with _broken_beyond_float32(rank):
        for dtype in (torch.float32, torch.float32, torch.float64):
            shard = session.begin(Video((4, 8, 8)), timestep=900.0).shard if with_session else layout.shard
            q, k, v = torch.randn(3, 1, HEADS, shard, 16, dtype=dtype)
            try:
                _ = session.attend(0, q, k, v) if with_session else attend(q, k, v)
            except UserError as error:
                return str(dtype), str(error)
    return "nowhere", ""


def engine_session(rank: int, world: int, path: str) -> None:
    """Makes an engine's session whose configuration is at `path` on rank 1."""
    config = path if rank == 1 else {"mask": WINDOW}
    EngineSession(SequenceGroup.from_group(), Strategy(world, 1), HEADS, 1, config)


def assert_rejected(answers: list[tuple[str, str]], phase: str, reason: str) -> None:
    assert [answer[0] for answer in answers] == [phase] * len(answers)
    for _, message in answers:
        assert reason in message


UNKNOWN, MISSING = "rank(s) [1]: unknown DBSP_KERNEL 'nonsense'", "rank(s) [1]: kernel 'fa4' cannot be used here"


@pytest.mark.parametrize(
    ("settings", "kernel", "phase", "reason"),
    [
        *((settings, "nonsense", "making", UNKNOWN) for settings in ({}, {"strategy": "U1R2"}, {"strategy": "auto"})),
        *((settings, "fa4", "attention", MISSING) for settings in ({}, {"strategy": "U1R2"}, {"strategy": "auto"})),
        ({"strategy": "auto"}, "sparge", "making", "kernel"),
        ({"strategy": "auto", "kernel": "fa4"}, "", "attention", "kernel 'fa4' cannot be used here"),
        ({"strategy": "auto", "kernel": "sparge"}, "", "attention", "kernel 'sparge' cannot be used here"),
    ],
)
def test_kernel_that_one_rank_cannot_use_is_rejected_on_all(pool, settings, kernel, phase, reason):
    """Expects an unknown name to be found when the session is made, and a missing kernel at the first attention."""
    assert_rejected(pool(2).run(rejected_session, settings, kernel), phase, reason)


@pytest.mark.parametrize("with_session", [True, False])
def test_kernel_that_one_rank_has_for_another_dtype_is_rejected_on_all(pool, with_session):
    reason = "rank(s) [1]: kernel 'cpu' cannot be used here: it is broken here"
    assert_rejected(pool(2).run(rejected_later, with_session), "torch.float64", reason)


def test_configuration_that_one_rank_of_an_engine_cannot_read_is_rejected_on_all(pool, tmp_path):
    assert_all_raise(pool, 2, "rank(s) [1]: configuration file", engine_session, str(tmp_path / "none.yaml"))
