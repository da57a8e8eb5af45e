"""What the workers of test_dense_parts run: dense heads on torch's dense kernel, beside the block kernel's rows."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import torch

from dbsp_core import BlockMask, DualBalancedAttention, SequenceGroup, make_plan
from dbsp_core.runtime import chunk_attention
from dbsp_core.runtime.tables import build_tables
from tests.support.attention_cases import Case, Inputs, random_mask, with_tables
from tests.support.dense_rows import dense_rows_on_the_cpu
from tests.support.oracle import dense_attention


def run_dense_parts(
    rank: int, world: int, case: Case, dense: tuple[int, ...], sabotage: bool
) -> tuple[float, int, int]:
    """(largest error, calls of the dense kernel, calls of the block kernel). dense: heads whose every block is

    sabotage: a part forgets its last block
    """
    given = Inputs.of(case, rank)
    bits = random_mask(case, case.grid).bits.clone()
    bits[list(dense)] = True
    mask = BlockMask(bits, case.grid)
    expected = dense_attention(given.full[0][:, :, given.mine], *given.full[1:], mask, queries=given.mine)
    plan = make_plan(mask, case.strategy, case.planner, layout=given.layout)
    executor = DualBalancedAttention.prepare(
        plan, mask, given.layout, SequenceGroup.of(), n_local=given.local[0].shape[2], kernel=case.kernel
    )
    tables = build_tables(executor.prepared.table_layout, mask, mask.bits.flatten(1).all(dim=1).numpy())
    if sabotage:
        tables = tuple(replace(table, dense=_one_block_less(table.dense)) for table in tables)
    with (
        dense_rows_on_the_cpu(),
        patch.object(chunk_attention, "attend_dense_part", side_effect=chunk_attention.attend_dense_part) as parts,
        patch.object(chunk_attention, "block_attention", side_effect=chunk_attention.block_attention) as blocks,
    ):
        out = with_tables(executor, tables)(*given.local)
    return float((out[:, :, given.places] - expected).abs().max()), parts.call_count, blocks.call_count


def _one_block_less(dense):
    if dense is None:
        return None
    fewer = tuple(
        replace(part, blocks=(part.blocks[0], part.blocks[1] - 1), tokens=None)
        for part in dense.parts
        if part.blocks[1] - part.blocks[0] > 1
    )
    return replace(dense, parts=fewer)


def gradients_too(rank: int, world: int, case: Case) -> float:
    """Largest error of gradients where every head is dense: backward reads the whole tables."""
    given = Inputs.of(case, rank)
    mask = BlockMask.dense(case.heads, case.grid)
    leaves = [t.double().requires_grad_(True) for t in given.full]
    dense_attention(*leaves, mask, queries=torch.arange(case.tokens)).square().sum().backward()
    local = [t.requires_grad_(True) for t in given.local]
    plan = make_plan(mask, case.strategy, layout=given.layout)
    executor = DualBalancedAttention.prepare(plan, mask, given.layout, SequenceGroup.of(), n_local=local[0].shape[2])
    every = mask.bits.flatten(1).all(dim=1).numpy()
    executor = with_tables(executor, build_tables(executor.prepared.table_layout, mask, every))
    with dense_rows_on_the_cpu():
        out = executor(*local)
    out[:, :, given.places].square().sum().backward()
    pairs = zip(local, leaves, strict=True)
    return max(float((a.grad[:, :, given.places] - b.grad[:, :, given.mine]).abs().max()) for a, b in pairs)
