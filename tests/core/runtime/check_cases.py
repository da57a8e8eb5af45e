"""What the workers of test_checks_on_all_ranks run: a session or attention that one rank alone cannot have."""

from __future__ import annotations

import gc
import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS

HEADS = 4
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}


def _on_rank_1(rank: int, kernel: str) -> Any:
    return mock.patch.dict(os.environ, {"DBSP_KERNEL": kernel} if rank == 1 else {})


def rejected_session(rank: int, world: int, settings: dict[str, Any], kernel: str) -> tuple[str, str]:
    """Where a session whose kernel $DBSP_KERNEL names on rank 1 alone is rejected, and the message."""
    config, where = DbspConfig.load({"mask": WINDOW, **settings}), "making"
    with _on_rank_1(rank, kernel):
        try:
            strategy = config.strategy_or(Strategy(world, 1))
            session = AttentionSession(config, SequenceGroup.from_group(), strategy, HEADS, 1)
            where = "size"
            layout = session.begin(Video((4, 8, 8)), timestep=900.0)
            q, k, v = torch.randn(3, 1, HEADS, layout.shard, 16)
            where = "attention"
            session.attend(0, q, k, v)
        except UserError as error:
            return where, str(error)
    return "nowhere", ""


def _broken_beyond_float32(rank: int) -> AbstractContextManager[Any]:
    """Within it, rank 1's kernels serve float32 alone."""

    def why_unsupported(self: Any, device: Any, given: torch.dtype, needs: Any = None) -> str | None:
        return "it is broken here" if rank == 1 and given != torch.float32 else None

    return mock.patch.object(type(KERNELS["cpu"]), "why_unsupported", why_unsupported)


def rejected_later(rank: int, world: int, dtype: torch.dtype) -> tuple[str, str]:
    """A kernel that rank 1 has for float32 alone is rejected at the first attention of another dtype."""
    config = DbspConfig.load({"mask": WINDOW, "kernel": "cpu"})
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy(1, world), HEADS, 1)
    where = "making"
    with _broken_beyond_float32(rank):
        try:
            for of_pass in (torch.float32, torch.float32, dtype):
                where = str(of_pass)
                layout = session.begin(Video((4, 8, 8)), timestep=900.0)
                q, k, v = torch.randn(3, 1, HEADS, layout.shard, 16, dtype=of_pass)
                session.attend(0, q, k, v)
        except UserError as error:
            return where, str(error)
    return "nowhere", ""


def rejected_attention(rank: int, world: int, dtype: torch.dtype) -> tuple[str, str]:
    """The same without a session."""
    mask, layout = BlockMask.dense(HEADS, BlockGrid.uniform(128, 16)), SequenceLayout.contiguous(128, world)
    plan = make_plan(mask, Strategy(1, world), layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, None, kernel="cpu")
    where = "making"
    with _broken_beyond_float32(rank):
        try:
            for of_pass in (torch.float32, torch.float32, dtype):
                where = str(of_pass)
                attend(*torch.randn(3, 1, HEADS, layout.shard, 16, dtype=of_pass))
        except UserError as error:
            return where, str(error)
    return "nowhere", ""


def rejected_engine(rank: int, world: int, path: str) -> str:
    """An engine's session whose configuration cannot be read on rank 1."""
    try:
        EngineSession(
            SequenceGroup.from_group(), Strategy(world, 1), HEADS, 1, path if rank == 1 else {"mask": WINDOW}
        )
    except UserError as error:
        return str(error)
    return ""


def kept_from_inference(
    rank: int, world: int, settings: dict[str, Any], strategy: str
) -> tuple[int, int, float, bool]:
    """A pass in inference mode, then training.

    Returns how many tensors are left of the first pass and how many of them autograd would reject, how far the passes
    are apart, and whether there are gradients.
    """
    session = AttentionSession(
        DbspConfig.load(settings), SequenceGroup.from_group(), Strategy.parse(strategy), HEADS, 1
    )
    before = {id(one) for one in gc.get_objects() if isinstance(one, torch.Tensor)}
    with torch.inference_mode():
        layout = session.begin(Video((4, 8, 8)), timestep=900.0)
        q, k, v = torch.randn(3, 1, HEADS, layout.shard, 16, generator=torch.Generator().manual_seed(rank))
        first = session.attend(0, q, k, v).tolist()
    given = [t.tolist() for t in (q, k, v)]
    del q, k, v
    gc.collect()
    kept = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and id(one) not in before]
    session.begin(Video((4, 8, 8)), timestep=900.0)
    q, k, v = (torch.tensor(one, requires_grad=True) for one in given)
    out = session.attend(0, q, k, v)
    out.square().sum().backward()
    apart = float((out.detach() - torch.tensor(first)).abs().max())
    rejected = sum(one.is_inference() for one in kept)
    return len(kept), rejected, apart, all(t.grad is not None for t in (q, k, v))
