"""The closed form of an attention's peak memory: equal to the counted one, and what follows from a limit on it."""

from __future__ import annotations

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.cost.peak_memory import mask_bytes, peak_bytes, prediction_bytes
from dbsp_core.cost.selection import ONE_AHEAD, SHARES, in_fastest_chunks
from dbsp_core.sources import LocalQK, MaskRequest, SpargeSource
from scripts.bench.peak_memory import Alive, peak_of_attention
from tests.core.cost.selection_cases import plans_within
from tests.support.attention_cases import in_chunks
from tests.support.generators import random_bits
from tests.support.workers import WorkerError

D = 16


def a_mask(heads: int, tokens: int = 1030) -> BlockMask:
    """Heads of very different densities, a short last block."""
    grid = BlockGrid.uniform(tokens, 16)
    bits = random_bits(heads, grid, seed=heads)
    bits[1::2, :, ::3] = False
    return BlockMask(bits, grid)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [40, 12, 5])
def test_every_ranks_peak_is_the_counted_one(heads, dtype, gradients):
    mask = a_mask(heads)
    for strategy in (*Strategy.all_for(8), Strategy(3, 2), Strategy(1, 1)):
        layout = SequenceLayout.striped(mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout)
        shape = AttentionShape(1, heads, mask.grid.tokens, D, dtype.itemsize)
        unit = heads * layout.shard * D * dtype.itemsize
        counted = [
            peak_of_attention(plan, mask, layout, rank, D, dtype, gradients=gradients)
            for rank in range(strategy.world)
        ]
        formula = peak_bytes(plan.assignment, shape, layout, gradients=gradients)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("keys", ["ring", "all", "needed"])
def test_every_ranks_peak_with_int8_on_the_wire(keys, dtype):
    mask = a_mask(12)
    for strategy in (*Strategy.all_for(8), Strategy(3, 2), Strategy(1, 1)):
        layout = SequenceLayout.striped(mask.grid, strategy)
        plan = make_plan(mask, strategy, layout=layout, keys=keys, precision="int8")
        shape = AttentionShape(1, 12, mask.grid.tokens, D, dtype.itemsize)
        unit = 12 * layout.shard * D * dtype.itemsize
        counted = [peak_of_attention(plan, mask, layout, rank, D, dtype) for rank in range(strategy.world)]
        formula = peak_bytes(plan.assignment, shape, layout)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("keys", ["all", "needed"])
def test_every_ranks_peak_with_keys_in_chunks(gradients, keys):
    mask = a_mask(12)
    ways = [(Strategy(8, 1), (1,), False), (Strategy(1, 6), (1,), False)]
    every = ((1,), (2, 1), (3, 2, 1), (1,) * 4, (1,) * 8)
    ways += [(Strategy(2, 4), shares, ahead) for shares in every for ahead in (False, True)]
    for strategy, *chunks in ways:
        layout = SequenceLayout.contiguous(mask.grid.tokens, strategy.world)
        plan = in_chunks(make_plan(mask, strategy, layout=layout, keys=keys), mask, *chunks)
        shape = AttentionShape(1, 12, mask.grid.tokens, D, 4)
        unit = 12 * layout.shard * D * 4
        counted = [
            peak_of_attention(plan, mask, layout, rank, D, torch.float32, gradients=gradients)
            for rank in range(strategy.world)
        ]
        formula = peak_bytes(plan.assignment, shape, layout, gradients=gradients)
        assert (formula / unit).tolist() == pytest.approx(counted, abs=1e-9), str(strategy)


@pytest.mark.parametrize("keys", ["needed", "all"])
def test_the_number_of_chunks_follows_from_the_limit(keys):
    mask, strategy = a_mask(12), Strategy(2, 4)
    layout, shape = (
        SequenceLayout.contiguous(mask.grid.tokens, strategy.world),
        AttentionShape(1, 12, mask.grid.tokens, D, 4),
    )
    plan = make_plan(mask, strategy, layout=layout, keys=keys)

    def peak(one):
        return float(peak_bytes(one.assignment, shape, layout).max())

    def chosen(limit, hardware=None):
        topology = Topology(8, 2)
        found = in_fastest_chunks(plan, mask, shape, hardware, topology, layout, lambda one: peak(one) - limit)
        return found.assignment.keys.shares, found.assignment.keys.one_ahead

    at_once = {chunks: in_chunks(plan, mask, chunks) for chunks in SHARES}
    one_ahead = {chunks: in_chunks(plan, mask, chunks, one_ahead=True) for chunks in ONE_AHEAD}
    # 1. Without a limit, what is predicted fastest; with no machine's constants, the fewest.
    machine = load_hardware("h200")
    seconds = {n: predict(one, shape, machine, Topology(8, 2), layout).total_s for n, one in at_once.items()}
    assert chosen(float("inf"), machine) in [
        (n, False) for n, one in seconds.items() if one <= 1.01 * min(seconds.values())
    ], "by what is nearly that"
    assert chosen(float("inf")) == ((1,), False)
    # 2. Below what chunks in flight at once hold, the fewest that fit, one ahead.
    peaks = {chunks: peak(one) for chunks, one in one_ahead.items()}
    assert list(peaks.values()) == sorted(peaks.values(), reverse=True)
    assert len(set(peaks.values())) > 2
    for limit in peaks.values():
        assert limit < min(map(peak, at_once.values()))
        assert chosen(limit, machine) == (next(n for n, one in peaks.items() if one <= limit), True)
    # 3. Where nothing fits, the least.
    assert chosen(0.0, machine) == (min(peaks, key=peaks.__getitem__), True)


@pytest.mark.parametrize(
    ("heads", "tokens", "block"), [(1, 4096, 8), (6, 4096, 8), (20, 4096, 16), (2, 9600, 8), (40, 600, 8)]
)
@pytest.mark.parametrize("settings", [{"cdf": 0.5}, {"topk": 0.3}], ids=["cdf", "topk"])
def test_what_a_prediction_holds(heads, tokens, block, settings):
    """It does not grow with the heads, nor all of it with the square of the tokens."""
    q = torch.randn(1, heads, tokens, D)
    source, request = SpargeSource(block, block, **settings), MaskRequest(0, heads, (1, 1, tokens))
    with Alive(q, integers=True) as alive:
        mask = source.mask(request, LocalQK.alone(q, q))
    shape = AttentionShape(1, heads, tokens, D, 4)
    formula = prediction_bytes(mask.grid, shape, 1, on_gpu=False)
    assert mask_bytes(mask.grid, heads) == mask.bits.untyped_storage().nbytes()
    assert alive.peak == pytest.approx(formula, rel=0.1)


class TestLimit:
    def run(self, pool, limit, free=None, batches=(1,), **settings):
        """(strategy, peak, most heads) of each layer, which all ranks have alike, and rank 0's warnings."""
        planner = {"memory_limit": limit, "exchange_cost": 0.0}  # balance first: memory last
        answers = pool(4).run(
            plans_within, {"strategy": "auto", "planner": planner, **settings}, free or {}, 5, batches
        )
        assert all(plans == answers[0][0] for plans, _ in answers)
        assert all(not told for _, told in answers[1:])
        return answers[0]

    def test_strategies_above_it_drop_out_on_all_ranks_alike(self, pool):
        free, warnings = self.run(pool, None, cost_model="h200")
        assert not warnings
        most = max(peak for _, peak, _ in free)
        assert self.run(pool, int(most), cost_model="h200") == (free, [])
        tight, warnings = self.run(pool, int(most) - 1, cost_model="h200")
        assert not warnings
        assert all(peak < most for _, peak, _ in tight)
        assert tight != free

    def test_a_larger_batch_is_judged_anew(self, pool):
        free, _ = self.run(pool, None, batches=(2,), cost_model="h200")
        limit = int(max(peak for _, peak, _ in free)) - 1
        (one, _), (two, _) = (self.run(pool, limit, batches=one, cost_model="h200") for one in ((1,), (2,)))
        assert [(strategy, heads) for strategy, _, heads in one] != [(strategy, heads) for strategy, _, heads in two]
        assert self.run(pool, limit, batches=(1, 2), cost_model="h200") == (two, [])
        assert self.run(pool, limit, batches=(1, 2, 1), cost_model="h200") == (one, [])

    def test_where_none_fits_the_least_is_taken_with_one_warning(self, pool):
        plans, (warning,) = self.run(pool, "1KiB")
        assert f"holds {plans[0][1] / 1024:.3g} KiB on a rank" in warning
        assert "planner.memory_limit leaves, 1 KiB: all strategies exceed it, so" in warning
        strategies = [self.run(pool, "1KiB", strategy=str(one))[0] for one in Strategy.all_for(4)]
        assert plans[0][1] == min(one[0][1] for one in strategies)

    def test_predicting_a_mask_counts(self, pool):
        """Blocks of two tokens: a prediction holds more than attention does."""
        mask = {"source": "sparge", "cdf": 0.5, "block_q": 2, "block_k": 2}
        plans, _ = self.run(pool, None, mask=mask)
        shape, grid = AttentionShape(1, 5, 192, D, 4), BlockGrid.uniform(192, 2)
        attention = max(peak for _, peak, _ in plans) + mask_bytes(grid, 5)
        prediction = prediction_bytes(grid, shape, 4, on_gpu=False)
        assert attention < prediction
        _, warnings = self.run(pool, int(prediction) + 1, mask=mask)
        assert not warnings
        _, (warning,) = self.run(pool, int(attention) + 1, mask=mask)
        assert f"holds {prediction / 1024:.3g} KiB on a rank" in warning

    def test_auto_is_the_least_that_any_rank_has_free_less_the_inputs(self, pool):
        free, _ = self.run(pool, "auto", strategy="U4R1")
        peak = max(peak for _, peak, _ in free)
        inputs = 3 * 5 * 48 * 16 * 4
        assert self.run(pool, "auto", {2: 4 * int(peak + inputs)}, strategy="U4R1") == (free, [])  # four on a host
        tight, _ = self.run(pool, "auto", {2: 4 * int(peak + inputs) - 4}, strategy="U4R1")
        assert max(peak for _, peak, _ in tight) < peak
        assert sum(heads for *_, heads in tight) < sum(heads for *_, heads in free)

    def test_where_nobody_knows_what_is_free_all_ranks_say_so(self, pool):
        with pytest.raises(WorkerError) as raised:
            pool(4).run(plans_within, {"strategy": "auto", "planner": {"memory_limit": "auto"}}, {1: None})
        assert [rank for rank, *_ in raised.value.errors] == [0, 1, 2, 3]
        assert all("write an amount" in text for *_, text in raised.value.errors)
