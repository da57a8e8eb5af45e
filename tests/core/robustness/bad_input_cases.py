"""What the workers run: calls that must fail alike on every rank, and leave the workers able to go on."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    dual_balanced_attention,
    make_plan,
)

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
    mask = a_mask()
    if rank == culprit:
        if fault == "not finite":
            k[0, 1, 2, 3] = torch.nan
        if fault == "other mask":
            mask = a_mask(seed=1)
        if fault == "other shape":
            q = q[:, :2]
    layout = SequenceLayout.contiguous(TOKENS, world)
    plan = make_plan(mask, f"U1R{world}", layout=layout)
    attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.of(), n_local=k.shape[2], debug=True)
    attend(q, k, v)
