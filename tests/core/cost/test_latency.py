"""The latency model: its arithmetic by hand, what it must grow and shrink with, and what it rejects."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange_tables import build_route
from dbsp_core.cost.machine import Constants, Hardware
from dbsp_core.cost.prediction import AttentionShape, attention_s, compute_s, predict, traffic_of
from tests.support.generators import random_bits

NAMES = Constants.__dataclass_fields__


def machine(**changes) -> Hardware:
    """Returns hardware with every constant 0 seconds or a rate of 1e30 (free), except those given."""
    constants = {name: 1e30 if name.endswith("_per_s") else 0.0 for name in NAMES}
    constants |= {"overlap": 1.0, "network_latency_s": None, "network_bytes_per_s": None, **changes}
    sources = {name: "assumed" for name, value in constants.items() if value is not None}
    return Hardware("test", "none", "bfloat16", Constants(**constants), sources)


def a_plan(strategy="U2R2", planner="dbsp", heads=6, tokens=512, layout_name=None, seed=3):
    grid = BlockGrid.uniform(tokens, 16)
    mask = BlockMask(random_bits(heads, grid, seed), grid)
    layout = SequenceLayout.named(layout_name, grid, Strategy.parse(strategy)) if layout_name else None
    return make_plan(mask, strategy, planner, layout=layout), mask, layout


def shape_of(plan, batch=1, head_dim=8, element_bytes=2) -> AttentionShape:
    return AttentionShape(batch, plan.heads, head_dim, element_bytes)


def test_int8_shrinks_queries_keys_and_values_and_the_output_if_asked():
    mask = BlockMask.dense(8, BlockGrid.uniform(4096, 64))
    precisions = "model", "int8", {"qkv": "int8", "out": "int8"}
    plans = [make_plan(mask, "U2R1", "contiguous", precision=precision) for precision in precisions]
    assert len({plan.fingerprint for plan in plans}) == 3
    shape, known = AttentionShape(1, 8, 128), machine(exchange_bytes_per_s=1.0)
    model, int8, both = (predict(plan, shape, known).exchange_s for plan in plans)
    leaves = 4096 * 8 // 4  # tokens of one head
    assert model == leaves * (3 * 256 + 256)
    assert int8 == leaves * (3 * 132 + 256) + 8 * 8 * 128, "with int64 sums of keys"
    assert both == int8 - leaves * (256 - 132)


def test_blocks_rows_scores_and_merges_are_counted():
    plan, _, _ = a_plan()
    found = predict(plan, shape_of(plan, batch=3), machine(flops_per_s=1e9, launch_s=0.5))
    expected = 0.5 * plan.strategy.ring + 3 * (4 * 16 * 16 * 8 / 1e9) * plan.work
    assert (found.attention_s, found.total_s) == pytest.approx((expected.max(), expected.max()))
    plan, _, _ = a_plan("U1R4")
    rows = np.bincount(plan.owner.ravel(), minlength=4)
    shape = shape_of(plan, batch=2)
    assert predict(plan, shape, machine(row_s=1.0)).total_s == 4 * 2 * rows.max()
    assert predict(plan, shape, machine(score_s=1.0)).attention_s == pytest.approx(plan.work.max() * 2 * 256)
    layout = SequenceLayout.contiguous(plan.grid.tokens, 4)
    merged = compute_s(plan, traffic_of(plan, layout), shape, machine(merge_bytes_per_s=1.0).constants)
    assert merged[1:] == pytest.approx(np.tile(12.0 * 2 * rows * 16 * 8, (3, 1)))
    assert merged[0] == pytest.approx(0)


def test_whole_rows_take_as_long_as_the_longest():
    """On kernels that do not cut rows; one row in a slot of 132 takes 132 times its share of the GPU."""
    bits = np.zeros((4, 8, 8), dtype=bool)
    bits[:, :, 0], bits[0, 0] = True, True
    plan = make_plan(BlockMask(bits, BlockGrid.uniform(8 * 128, 128)), "U2R1")
    known = replace(machine(flops_per_s=1e9), multiprocessors=132, capability=90)
    shape = AttentionShape(1, 4, 128)
    seconds = [predict(plan, shape, known.with_kernel(kernel)).attention_s for kernel in ("triton", "fa4")]
    block = 4 * 128**3 / 1e9
    assert seconds == pytest.approx([plan.work.max() * block, 132 * 8 * block])
    assert known.fingerprint != known.with_kernel("fa4").fingerprint


ORDERED = BlockGrid(480, 0, 16, 16, thw=(5, 8, 12), orders=("thw", "hwt", "thw"))


@pytest.mark.parametrize(
    ("strategy", "keys", "grid"),
    [
        ("U4R1", "all", ORDERED),
        ("U2R2", "needed", ORDERED),
        ("U2R2", "all", BlockGrid.uniform(500, 16)),
        ("U1R4", "needed", BlockGrid.uniform(500, 16)),
    ],
)
def test_traffic_equals_what_the_routes_send(strategy, keys, grid):
    mask = BlockMask(random_bits(3, grid, 3), grid)
    layout = SequenceLayout.named("striped" if keys == "all" else "contiguous", grid, Strategy.parse(strategy))
    plan = make_plan(mask, strategy, layout=layout, keys=keys)
    traffic = traffic_of(plan, layout)
    received = 0
    for rank in range(4):
        route = build_route(plan, layout, rank, layout.shard)
        of_keys = (*route.dispatch_exchanges, *route.fetch_exchanges)
        first = np.sum([exchange.sent for exchange in route.dispatch_exchanges], axis=0)
        assert first.tolist() == (traffic.queries[rank] + 2 * traffic.keys[0, rank]).tolist()
        sent = np.sum([exchange.sent for exchange in of_keys], axis=0)
        assert sent.tolist() == (traffic.queries[rank] + 2 * traffic.keys.sum(axis=0)[rank]).tolist()
        assert list(route.combine_exchange.received) == traffic.queries[rank].tolist()
        assert route.q_slots == traffic.rows[rank] * 16
        assert route.kv_slots == traffic.blocks[0, rank] * 16
        assert list(route.fetched_blocks) == traffic.blocks[1:, rank].tolist()
        came = np.sum([exchange.received for exchange in of_keys], axis=0)
        received += came.sum() - came[rank] - traffic.queries[:, rank].sum() + traffic.queries[rank, rank]
    assert traffic.kv_received == received / 4


def test_chunk_is_fetched_while_the_kernel_runs_on_the_chunk_before():
    """Computes by hand: kernels of 1, 4, 1 and 1 s; transfers of 1, 1 and 3 s."""
    compute, transfers = np.array([[1.0], [4.0], [1.0], [1.0]]), (1.0, 1.0, 3.0)
    assert attention_s(compute, transfers, 1.0) == 1 + 4 + 3 + 1
    assert attention_s(compute, transfers, 0.0) == 7 + 5, "where nothing hides, all is added up"


def test_bytes_between_nodes_take_the_network():
    plan, _, _ = a_plan("U4R1", "contiguous", heads=8)
    known = machine(network_latency_s=0.0, network_bytes_per_s=1.0, exchange_bytes_per_s=100.0)
    apart, alone = (predict(plan, shape_of(plan), known, nodes).exchange_s for nodes in ([0, 0, 1, 1], [0] * 4))
    sent = 512 / 4 * 8 / 4 * 2 * 4 * 8 * 2  # to the two ranks of the other node
    assert (apart, alone) == pytest.approx((sent, sent * 1.5 / 100))


@pytest.mark.parametrize(
    "name", [n for n in NAMES if not n.startswith(("network", "linear", "serial", "overlap", "predict", "dense"))]
)
def test_worse_constant_makes_the_prediction_slower(name):
    plan, _, _ = a_plan("U2R2", layout_name="striped")
    rates = {n: 1e6 for n in NAMES if n.endswith("_per_s") and not n.startswith("network")}
    hardware = machine(**rates, overlap=0.5)
    worse = getattr(hardware.constants, name) / 2 if name.endswith("_per_s") else 1.0
    slower = replace(hardware, constants=replace(hardware.constants, **{name: worse}))
    before, after = (predict(plan, shape_of(plan), one).total_s for one in (hardware, slower))
    assert after > before


def test_arguments_that_do_not_fit_raise():
    plan, _, _ = a_plan("U2R2")
    with pytest.raises(ValueError, match="expected a shape with the plan's 6 heads, got 5"):
        predict(plan, replace(shape_of(plan), heads=5), machine())
    with pytest.raises(ValueError, match="use one of U8R1"):
        predict(plan, shape_of(plan), machine(), [0] * 8)
    with pytest.raises(ValueError, match="pass the layout that the plan was made for"):
        predict(plan, shape_of(plan), machine(), layout=SequenceLayout.contiguous(512, 2))
    with pytest.raises(ValueError, match="add network_latency_s and network_bytes_per_s, or use one node"):
        predict(plan, shape_of(plan), machine(), [0, 0, 1, 1])
