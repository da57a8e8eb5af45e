"""Dense heads apart from the others: which of them are one call, and that the results are the reference's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, SequenceGroup, Strategy, make_plan
from dbsp_core.runtime import chunk_attention
from dbsp_core.runtime.tables import build_tables, dense_spans_of, table_layout
from dbsp_kernels import DensePart, dense
from tests.support.attention_cases import Case, Inputs, random_owners, with_tables
from tests.support.oracle import dense_attention, largest_difference

CUDA = torch.device("cuda")


def with_dense_heads(mask: BlockMask, heads: tuple[int, ...]) -> BlockMask:
    """Returns the mask with these heads, and no others, dense in every sequence."""
    parts = []
    for part in mask.parts:
        bits = part.bits.clone()
        bits[:, 0, 0] = False
        bits[list(heads)] = True
        parts.append(BlockMask(bits, part.grid))
    return BlockMask.packed(parts) if len(parts) > 1 else parts[0]


def dense_parts(mask: BlockMask) -> tuple[DensePart, ...]:
    """Returns the parts of the dense rows of one rank without a ring: heads are whole, and follow one another."""
    (of_chunk,) = build_tables(table_layout(make_plan(mask, "U1R1"), 0), mask, dense_spans_of(mask, CUDA)).dense
    return of_chunk.parts if of_chunk else ()


def covered(starts: range, count: int) -> list[list[int]]:
    return [list(range(start, start + count)) for start in starts]


@pytest.mark.parametrize("tokens", [96, 100])
@pytest.mark.parametrize(
    ("heads", "groups"),
    [
        ((), []),
        ((0, 1, 2, 3, 4), [range(5)]),
        ((3,), [range(3, 4)]),
        ((1, 4), [range(1, 5, 3)]),
        ((0, 2, 4), [range(0, 5, 2)]),
        ((0, 1, 3), [range(2), range(3, 4)]),
        ((0, 1, 3, 4), [range(2), range(3, 5)]),
    ],
)
def test_equal_heads_at_equal_distance_are_one_part(heads, groups, tokens):
    grid = BlockGrid.uniform(tokens, 16)
    mask = with_dense_heads(BlockMask(torch.rand(5, grid.nq, grid.nk) < 0.5, grid), heads)
    parts, n = dense_parts(mask), grid.nq
    every = [[list(range(head * n, (head + 1) * n)) for head in group] for group in groups]
    assert [covered(part.row_starts, part.rows) for part in parts] == every
    assert [covered(part.block_starts, part.blocks) for part in parts] == every
    for part in parts:
        assert (part.tokens is None) == (tokens == 96)
        assert part.tokens is None or part.tokens.tolist() == list(range(tokens))


def test_single_token_stays_with_the_block_kernel():
    """cuDNN takes no single key."""
    sequences = [BlockMask.dense(2, BlockGrid.uniform(tokens, 16)) for tokens in (1, 40)]
    assert [covered(part.row_starts, part.rows) for part in dense_parts(BlockMask.packed(sequences))] == [
        [[1, 2, 3], [5, 6, 7]]
    ]


@contextlib.contextmanager
def dense_rows_on_the_cpu() -> Iterator[list[torch.Size]]:
    """Runs dense rows apart from the others in this process, within a block. Yields the shapes of q of all calls."""
    shapes: list[torch.Size] = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(q.shape)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        return out, lse

    kernel = dense.FusedKernel("cpu", lambda inputs: True, run)
    with (
        patch.object(chunk_attention, "fused_kernel", return_value="cpu"),
        patch.object(dense, "_chosen", return_value=kernel),
    ):
        yield shapes


def run(rank: int, world: int, case: Case, heads: tuple[int, ...]) -> tuple[float, bool, int]:
    """Returns the largest error on this rank's tokens, whether it had dense rows, and the parts of its chunks."""
    inputs = Inputs.from_case(case, rank)
    mask, layout = with_dense_heads(inputs.mask, heads), inputs.layout
    plan = make_plan(mask, Strategy.parse(case.strategy), layout=layout)
    if case.planner == "random":
        plan = random_owners(plan, mask, case.seed)
    attention = DualBalancedAttention.prepare(
        plan, mask, layout, SequenceGroup.from_group(), n_local=inputs.local[0].shape[2], debug=True
    )
    tables = build_tables(attention.prepared.table_layout, mask, dense_spans_of(mask, CUDA))
    out = with_tables(attention, tables)(*inputs.local, scale=case.head_dim**-0.5)
    q, k, v = inputs.full
    expected = dense_attention(q[:, :, inputs.mine], k, v, mask, queries=inputs.mine)
    parts = sum(len(of_chunk.parts) for of_chunk in tables.dense if of_chunk)
    return largest_difference(out[:, :, inputs.slots], expected), parts > 0, parts


CASES = [
    Case("U1R1", heads=5),
    Case("U2R1", heads=5, batch=2),
    Case("U1R3", heads=5, tokens=193, block_q=32, batch=2, seed=1),
    Case("U3R1", heads=5, tokens=224, seed=2),  # a head is split
    Case("U2R2", planner="random", heads=4, batch=2, seed=4),
    Case("U1R4", thw=(3, 5, 9), tokens=135, orders=("tile:2x2x4",), whole_tiles=True, dtype=torch.float64, seed=5),
]
HEADS = [(0, 1, 2, 3, 4), (0, 2), (1, 2, 4)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_dense_heads_apart_give_the_reference(threads, case):
    world, most = Strategy.parse(case.strategy).world, 1e-5 if case.dtype == torch.float32 else 1e-12
    for heads in HEADS:
        heads = tuple(head for head in heads if head < case.heads)
        with dense_rows_on_the_cpu() as shapes:
            errors, has_some, parts = zip(*threads(world).run(run, case, heads), strict=True)
        assert max(errors) <= most, heads
        assert any(has_some), heads
        assert len(shapes) == sum(parts), "one call a part and chunk, for any batch"
        assert {shape[0] for shape in shapes} == {case.batch}
