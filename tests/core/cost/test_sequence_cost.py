"""Work and bytes of plans for several sequences, against plans and routes of packed masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, Strategy, make_plan
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.cost.sequence_cost import (
    LayerSize,
    SequenceWork,
    bag_layout,
    whole_layout,
)
from dbsp_core.planning.bags import BagTopology
from dbsp_core.planning.sequences import SequenceCost, SequencePlan, plan_sequences
from dbsp_core.utils.errors import UserError
from scripts.reproduce.knapformer.counted import evaluate, moved_tokens, work_of
from tests.support.generators import random_bits

HEADS, WORLD = 6, 9
SIZES = ((70, 11), (300, 0), (45, 45), (128, 5), (33, 0), (90, 3), (512, 20))
"""(tokens, of them text) of sequences."""


def small_masks():
    grids = [BlockGrid(tokens, text, 16, 16) for tokens, text in SIZES]
    return [BlockMask(random_bits(HEADS, grid, seed), grid) for seed, grid in enumerate(grids)]


def planned(
    work: SequenceWork, loader: Sequence[int], topology: BagTopology, cost: SequenceCost, most: int | None = None
) -> SequencePlan:
    return plan_sequences(cost.picoseconds(work.tokens, work.blocks), work.tokens, np.array(loader), topology, most)


@pytest.mark.parametrize("bags", ["g1n1", "g2n2+g5n1", "g9n1"])
def test_counted_work_and_bytes_equal_those_of_packed_plans(bags):
    masks, topology = small_masks(), BagTopology.parse(bags, WORLD)
    work, loader = work_of(masks), np.array([0, 0, 1, 2, 4, 6, 8])
    layer, cost = LayerSize(HEADS, 16, 1e6), SequenceCost(3e-9, 2e-9)
    plan = planned(work, loader, topology, cost)
    found = evaluate(plan, work, loader, cost, layer)
    rhos = [1.0]
    for bag, (first, ranks) in enumerate(zip(topology.first_rank, topology.ranks, strict=True)):
        own, here = np.flatnonzero(plan.bag == bag), slice(first, first + ranks)
        if not len(own):
            assert found.tokens[here].sum() == found.blocks[here].sum() == 0
            with pytest.raises(UserError, match="no sequences"):
                bag_layout(plan, work.tokens, bag)
            continue
        mask, layout = BlockMask.packed([masks[one] for one in own]), bag_layout(plan, work.tokens, bag)
        packed = make_plan(mask, Strategy(int(ranks), 1), layout=layout)
        assert found.blocks[here].tolist() == packed.work.tolist()
        assert found.tokens[here].tolist() == np.bincount(layout.rank, minlength=ranks).tolist()
        traffic = traffic_of(packed, layout)
        both = [tokens * (layer.head_dim * layer.element_bytes) for tokens in (traffic.dispatch, traffic.queries.T)]
        sent = sum(both)
        assert found.sent_bytes[here] == pytest.approx(sent.sum(axis=1) - sent.diagonal())
        rhos.append(packed.rho)
    assert found.rho == max(rhos)
    assert found.blocks.sum() == work.blocks.sum()
    assert np.array_equal(found.picoseconds, cost.picoseconds(found.tokens, found.blocks))
    assert found.moved == moved_tokens(plan.runs, loader, 1)[0]


@pytest.mark.parametrize("streams", ["first", "last", None])
def test_layouts_of_the_group_and_of_bags_have_tokens_in_the_same_slots(streams):
    tokens, loader = np.array([5, 9, 3, 8, 2]), np.array([1, 0, 1, 2, 3])
    plan = plan_sequences(tokens, tokens, loader, BagTopology.parse("g2n2", 4))
    text = np.random.default_rng(0).random(tokens.sum()) < 0.4
    whole = whole_layout(plan, tokens).with_streams(text, streams)
    sequence = np.repeat(np.arange(len(tokens)), tokens)
    for bag in range(2):
        own = np.isin(sequence, np.flatnonzero(plan.bag == bag))
        layout = bag_layout(plan, tokens, bag).with_streams(text[own], streams)
        assert (layout.rank + 2 * bag).tolist() == whole.rank[own].tolist()
        assert layout.local.tolist() == whole.local[own].tolist()
    for rank in range(4):
        kinds = text[whole.tokens_at(rank)[0]].tolist()
        if streams is not None:
            assert kinds == sorted(kinds, reverse=streams == "first")
