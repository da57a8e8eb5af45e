"""db-SP's attention in the place of para-attn's own ring and Ulysses functions, for para-attn's tests of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, BlockMask, dual_balanced_attention
from dbsp_core.utils.errors import UserError
from scripts.checks.upstream.counting import count_attention

__all__ = ["replace_functions"]

BLOCK = 128


def replace_functions() -> None:
    """In `para_attn.para_attn_interface`: whole attention over a ring of all ranks, or over their heads."""
    from para_attn import para_attn_interface

    para_attn_interface.ring_attn_func = _attention("U1R{}")
    para_attn_interface.ulysses_attn_func = _attention("U{}R1")


def _attention(strategy: str) -> Any:
    def attention(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, **options: Any
    ) -> torch.Tensor:
        if options.get("is_causal") or attn_mask is not None or query.shape != key.shape:
            raise UserError("db-SP computes self-attention without a causal mask")
        world = dist.get_world_size()
        grid = BlockGrid.uniform(query.shape[-2] * world, BLOCK)
        mask = BlockMask(torch.ones(query.shape[1], grid.nq, grid.nk, dtype=torch.bool), grid)
        count_attention()
        return dual_balanced_attention(query, key, value, mask, strategy.format(world))

    return attention
