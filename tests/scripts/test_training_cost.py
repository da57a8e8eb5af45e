"""What training costs beside inference: bytes and memory as they are counted in real processes, times by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, make_plan
from dbsp_core.comm.all_to_all import exchange_q_separately
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.utils.errors import UserError
from scripts.reproduce.training_cost import predict_backward, saved_bytes, sent_backward, sent_forward
from tests.core.cost.latency_cases import a_plan, machine, shape_of
from tests.scripts.training_cost_cases import counted_and_modelled
from tests.support.attention_cases import Case


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (2, "U2R1"), (3, "U1R3"), (4, "U2R2")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_bytes_are_those_that_are_sent_and_kept(pool, world, strategy, dtype):
    """Uneven heads, short blocks, text, two items; under planner `dbsp` heads are split and rows moved."""
    case = Case(
        strategy, "dbsp", heads=5, tokens=331, text_tokens=37, batch=2, layout="striped", dtype=dtype, padded=True
    )
    for found in pool(world).run(counted_and_modelled, case):
        for counted, modelled in found:
            assert counted == modelled


@pytest.mark.parametrize(
    ("strategy", "forward", "backward"),
    # Of a rank's q, on 8 ranks in float32. Ulysses: q, k, v and out, 7/8 of each, both ways. A ring: K, V seven times,
    # and in backward dK, dV eight times too.
    [("U8R1", 3.5, 3.5), ("U1R8", 14.0, 30.0)],
)
def test_the_published_units(strategy, forward, backward):
    grid = BlockGrid.uniform(1024, 16)
    plan = make_plan(BlockMask.dense(8, grid), strategy, "contiguous")
    shape, layout = AttentionShape(1, 8, 1024, 64, 4), SequenceLayout.contiguous(1024, 8)
    unit = 1024 * shape.token_bytes
    assert sent_forward(plan, shape, layout).total == pytest.approx(forward * unit)
    assert sent_backward(plan, shape, layout).total == pytest.approx(backward * unit)
    assert saved_bytes(plan, shape, layout) == pytest.approx(4 * unit + 1024 * 4), "q, k, v, out and log-sum-exps"


def test_gradients_travel_in_float32():
    plan, _, layout = a_plan("U1R4", layout_name="striped")
    half, single = (sent_backward(plan, shape_of(plan, element_bytes=size), layout) for size in (2, 4))
    keys = sent_forward(plan, shape_of(plan), layout).handed_over
    assert single.handed_over - half.handed_over == pytest.approx(keys), "of the hand-overs only K and V shrink"


class TestTime:
    def test_five_products_for_two(self):
        plan, _, _ = a_plan("U2R2")
        known = machine(flops_per_s=1e9)
        forward, backward = (f(plan, shape_of(plan, batch=3), known).total_s for f in (predict, predict_backward))
        assert backward == pytest.approx(2.5 * forward)

    def test_gradients_of_keys_travel_one_period_behind_and_once_more(self):
        plan, _, _ = a_plan("U1R4", "contiguous")
        shape = shape_of(plan, element_bytes=2)
        p2p = [p2p for _, p2p in predict_backward(plan, shape, machine(p2p_bytes_per_s=1.0)).times.periods]
        keys = 2 * 6 * 128 * 8 * 2  # K and V of a quarter of 512 tokens; gradients are twice as wide
        assert p2p == [keys, keys + 2 * keys, keys + 2 * keys, 2 * keys, 2 * keys]

    def test_the_last_hand_over_hides_behind_nothing(self):
        plan, _, _ = a_plan("U1R4")
        found = predict_backward(plan, shape_of(plan), machine(p2p_latency_s=1.0, launch_s=100.0))
        assert found.times.exposed_s == pytest.approx(1.0)

    def test_without_a_ring_nothing_is_handed_over(self):
        plan, _, _ = a_plan("U4R1")
        found = predict_backward(plan, shape_of(plan), machine(p2p_latency_s=1.0, exchange_latency_s=0.25))
        assert (found.times.exposed_s, found.exchange_s) == (
            0,
            0.25 * (3 if exchange_q_separately(plan.assignment) else 2),
        )

    @pytest.mark.parametrize("name", ["score_s", "row_s", "launch_s", "call_s", "exchange_latency_s", "p2p_latency_s"])
    def test_every_constant_makes_it_longer(self, name):
        plan, _, layout = a_plan("U2R2", layout_name="striped")
        base = machine(flops_per_s=1e9, p2p_bytes_per_s=1e9, exchange_bytes_per_s=1e9, overlap=0.0)
        longer = replace(base, constants=replace(base.constants, **{name: 0.1}))
        shape = shape_of(plan)
        assert predict_backward(plan, shape, longer, None, layout).total_s > 0.1
        assert predict_backward(plan, shape, base, None, layout).total_s < 0.1

    def test_packing_and_adding_up_are_counted(self):
        plan, _, layout = a_plan("U1R4", layout_name="striped")
        shape = shape_of(plan, batch=2)
        slow = predict_backward(plan, shape, machine(merge_bytes_per_s=1.0), None, layout)
        rows = 16 * np.bincount(plan.assignment.q_owner.ravel(), minlength=4)
        first = slow.times.periods[0][0]
        assert first in (rows * 2 * 8 * 12).tolist(), "only dQ is added up in the first"
        assert slow.times.periods[1][0] > slow.times.periods[0][0]
        assert predict_backward(plan, shape, machine(pack_bytes_per_s=1.0), None, layout).pack_s > 0

    def test_what_does_not_fit_is_refused(self):
        plan, _, _ = a_plan("U2R2")
        with pytest.raises(UserError, match="give the plan's"):
            predict_backward(plan, AttentionShape(1, 7, 512, 8), machine())
        with pytest.raises(UserError, match="network"):
            predict_backward(plan, shape_of(plan), machine(), Topology(4, 2))
