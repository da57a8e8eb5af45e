"""Plans: every row has one owner, every block one source, and metrics equal plain counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import BlockGrid, BlockMask, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.planning.planners import PLANNERS
from tests.support.generators import EVERY_STRATEGY, examples, problems, random_bits


def counted(plan: Plan, mask: BlockMask) -> float:
    """Returns ρ_s, counted active block by active block."""
    done = Counter(int(plan.owner[h, i]) for h, i, _ in mask.bits.nonzero().tolist())
    return max(done.values()) / (done.total() / plan.strategy.world) if done else 1.0


@pytest.mark.parametrize("strategy", EVERY_STRATEGY, ids=str)
@given(data=st.data())
@examples(12)
def test_rows_blocks_and_numbers_are_what_plain_counting_gives(strategy, data):
    problem = data.draw(problems(strategy))
    plan, layout, (x, y) = problem.plan(), problem.layout, (strategy.ulysses, strategy.ring)
    grid, heads, ranks = plan.grid, problem.mask.heads, range(strategy.world)
    # 1. Every row is computed by exactly one rank.
    rows = [row for rank in ranks for row in zip(*map(list, plan.rows_of(rank)), strict=True)]
    assert sorted(rows) == list(np.ndindex(heads, grid.nq))
    # 2. Every rank is sent each KV block of its column's heads once, from the ring rank that each chunk is of.
    source = np.broadcast_to(plan.chunks.k_ring_rank, (heads, grid.nk))
    for rank in ranks:
        of_column = {h for one in range(rank % x, strategy.world, x) for h in plan.rows_of(one)[0].tolist()}
        chunks = plan.chunks.blocks_for(rank)
        assert len(chunks) == y
        sent = [block for chunk in chunks for block in zip(*(a.tolist() for a in chunk), strict=True)]
        assert sorted(sent) == [(h, j) for h in sorted(of_column) for j in range(grid.nk)]
        for number, (head, block) in enumerate(chunks):
            assert ((rank // x - number) % y == source[head, block]).all()
    # 3. Planners but for "dbsp" leave heads whole within a column, and blocks within a ring rank.
    if problem.planner != "dbsp":
        assert plan.split_heads == 0
        assert (plan.owner % x == plan.owner[:, :1] % x).all()
        assert (plan.owner // x == plan.owner[:1] // x).all()
    # 4. Numbers.
    assert plan.rho == pytest.approx(counted(plan, problem.mask))
    assert plan.rho >= plan.rho_bound >= 1.0
    moved = plan.owner[:, grid.q_axis.block_of] // x != layout.rank // x
    assert plan.moved == pytest.approx(moved.mean())
    before = make_plan(problem.mask, strategy, "contiguous")
    assert plan.rho_before == before.rho == before.rho_before
    # 5. Equal arguments give equal plans, and another mask the same numbers as a plan of its own, but for ρ_s.
    other = BlockMask(random_bits(heads, grid, 1), grid)
    fresh = replace(problem, mask=other).plan()
    for reused in (plan.counted(other), plan.counted(other.bits.sum(dim=2).numpy())):
        assert (reused.fingerprint, reused.moved, reused.plan_ms) == (plan.fingerprint, plan.moved, 0.0)
        assert reused.rho == pytest.approx(counted(plan, other))
        assert (reused.rho_before, reused.rho_bound) == (fresh.rho_before, fresh.rho_bound)
    again = replace(problem, mask=BlockMask(problem.mask.bits.clone(), grid)).plan()
    assert plan.same_routes(again)
    assert 0 <= plan.fingerprint == again.fingerprint < 2**63


@given(st.data())
@examples(40)
def test_fingerprint_changes_with_one_row_or_block(data):
    strategy = Strategy(ulysses=2, ring=3)
    plan = data.draw(problems(strategy)).plan()
    chunks = plan.chunks

    def one_elsewhere(values, parts):
        changed, index = values.copy(), data.draw(st.integers(0, values.size - 1))
        changed.flat[index] = (changed.flat[index] + 1) % parts
        return changed

    moved_row = replace(plan, owner=one_elsewhere(plan.owner, strategy.world))
    moved_block = replace(plan, chunks=replace(chunks, k_ring_rank=one_elsewhere(chunks.k_ring_rank, strategy.ring)))
    assert len({one.fingerprint for one in (plan, moved_row, moved_block)}) == 3


def test_contiguous_and_paper_plans_equal_those_by_hand():
    # 8 tokens in blocks of 2 on U1R2 with a causal mask: rows need 1, 2, 3, 4 blocks. Rank 0 has rows 0, 1 and does 3,
    # rank 1 does 7: ρ_s = 7 / (10 / 2) = 1.4.
    mask = BlockMask(np.tri(4, dtype=bool)[None], BlockGrid.uniform(8, 2))
    plan = make_plan(mask, "U1R2", "contiguous")
    assert plan.owner.tolist() == [[0, 0, 1, 1]]
    assert [[block.tolist() for _, block in plan.chunks.blocks_for(rank)] for rank in (0, 1)] == [
        [[0, 1], [2, 3]],
        [[2, 3], [0, 1]],
    ]
    assert (plan.work.tolist(), plan.longest.tolist()) == ([3, 7], [2, 4])
    assert (plan.rho, plan.moved) == (1.4, 0.0)
    assert plan.row_share(3) == max(2 * 3 / 3, 4 * 3 / 7)
    # The same mask, R_b = 1. Rows, largest first: 4 stays, as 0 − 4 < 0; 3, 0 locally: 4 − 3 > 0, moves to rank 0;
    # 2 locally: 3 − 2 < 4, stays; 1 locally: 5 − 1 = 4, a tie that the lower rank wins, so it stays.
    plan = make_plan(mask, "U1R2", "paper")
    assert plan.owner.tolist() == [[0, 0, 0, 1]]
    assert plan.work.tolist() == [6, 4]
    assert (plan.rho, plan.rho_before, plan.rho_bound) == (1.2, 1.4, 1.0)
    assert plan.moved == 0.25


def test_ranks_without_rows_are_idle():
    plan = make_plan(BlockMask(np.zeros((2, 4, 4), dtype=bool), BlockGrid.uniform(64, 16)), "U2R1")
    assert (plan.longest.tolist(), plan.row_share(132)) == ([0, 0], 0)
    for planner in PLANNERS:
        plan = make_plan(BlockMask.dense(2, BlockGrid.uniform(64, 16)), "U1R5", planner)
        assert (plan.work.sum(), len(plan.chunks.blocks_for(4))) == (2 * 4 * 4, 5)


def test_mask_or_layout_of_another_size_raises():
    mask, other = (BlockMask.dense(2, BlockGrid.uniform(64, block)) for block in (16, 8))
    plan = make_plan(mask, "U2R1")
    assert not plan.fits(other)
    with pytest.raises(ValueError, match="expected a mask of 2 heads, got 3; make a plan for this mask"):
        plan.counted(BlockMask.dense(3, mask.grid))
    with pytest.raises(ValueError, match=r"expected a mask on .*, got .*; make a plan for this mask"):
        plan.counted(other)
    with pytest.raises(ValueError, match=r"expected row counts of 2 heads of 4 query blocks, got \(2, 5\)"):
        plan.counted(np.ones((2, 5), dtype=np.int64))
    for tokens, world in ((63, 2), (64, 4)):
        with pytest.raises(ValueError, match=f"got {tokens} on {world}; build it from the same grid and strategy"):
            make_plan(mask, "U2R1", layout=SequenceLayout.contiguous(tokens, world))
