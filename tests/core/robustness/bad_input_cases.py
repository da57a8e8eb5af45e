"""What the workers run: calls that must fail alike on every rank, and leave the workers able to go on."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    dual_balanced_attention,
    make_plan,
)
from dbsp_core.utils.packages import package_versions

TOKENS, HEADS, WIDTH = 200, 3, 8


def a_mask(seed: int = 0) -> BlockMask:
    generator = torch.Generator().manual_seed(seed)
    grid = BlockGrid.uniform(TOKENS, block=16)
    return BlockMask(torch.rand(HEADS, grid.nq, grid.nk, generator=generator) < 0.5, grid)


def local_inputs(rank: int, world: int) -> list[torch.Tensor]:
    n_local = len(SequenceLayout.contiguous(TOKENS, world).tokens_at(rank)[0])
    return [torch.randn(1, HEADS, n_local, WIDTH) for _ in range(3)]


def call(rank: int, world: int, options: dict[str, Any]) -> None:
    """One attention with settings that may not fit."""
    options = {"strategy": f"U{world}R1", **options}
    dual_balanced_attention(*local_inputs(rank, world), a_mask(), **options)


def call_with_wrong_shapes(rank: int, world: int) -> None:
    dual_balanced_attention(*(t[:, :2] for t in local_inputs(rank, world)), a_mask(), f"U{world}R1")


def call_where_one_rank_differs(rank: int, world: int, culprit: int, fault: str) -> None:
    """Under debug, what only one rank can see must stop all of them."""
    q, k, v = local_inputs(rank, world)
    mask, home, scale, options, versions = a_mask(), "contiguous", 0.5, {"debug": True}, {}
    if rank == culprit:
        home = "striped" if fault == "other layout" else home
        scale = 0.6 if fault == "other scale" else scale
        options |= {"other kernel": {"kernel": "reference"}, "no debug": {"debug": False}}.get(fault, {})
        versions = {"triton": "0.0"} if fault == "other version" else {}
        if fault == "not finite":
            k[0, 1, 2, 3] = torch.nan
        if fault == "other mask":
            mask = a_mask(seed=1)
        if fault == "other shape":
            q = q[:, :2]
    strategy = Strategy(1, world)
    layout = SequenceLayout.named(home, mask.grid, strategy)
    plan = make_plan(mask, strategy, layout=SequenceLayout.contiguous(TOKENS, world))
    with mock.patch("dbsp_core.utils.packages.package_versions", return_value=package_versions() | versions):
        attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.of(), n_local=k.shape[2], **options)
    attend(q, k, v, scale=scale)
