"""Sequences distributed over bags of ranks: exactly as one by one, forward and backward, for any bags."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers.packed.bag_cases import BagCase, bad_bags, groups_of_attention, in_bags, int8_in_bags, tokens_held
from tests.support.workers import assert_all_raise

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, BagCase("g1n4", samples=(2,))),
        (4, BagCase("g2n2", "sparge", samples=(1, 4), seed=4, checkpointing=True)),
        (4, BagCase("auto", seed=7, dtype=torch.float32)),
        (4, BagCase("g1n2+g2n1", "sparge", samples=(2, 1), seed=8, fsdp=True, checkpointing=True)),
        (4, BagCase("g2n2", "dense", seed=14, model="hunyuan", local=False, planner="contiguous")),
        (4, BagCase("g2n2", samples=(2,), seed=13, model="wan-lora", checkpointing=True)),
        (4, BagCase("g4n1", samples=(3, 3), seed=14, moved=True)),  # the same sizes in another layout
        long(4, BagCase("g1n2+g2n1", "sparge", samples=(2, 1), seed=8, model="flux", fsdp=True, checkpointing=True)),
        long(4, BagCase("g1n2+g2n1", samples=(2, 1), seed=8, model="hunyuan", fsdp=True, checkpointing=True)),
        long(6, BagCase("g2n3", samples=(2, 12), seed=9)),
        long(6, BagCase("g1n2+g4n1", samples=(3, 20), seed=12)),
    ],
    ids=lambda value: f"{value.model} {value.bags}" if isinstance(value, BagCase) else str(value),
)
def test_samples_in_bags_equal_one_by_one(pool, world, case):
    ranks = pool(world).run(in_bags, case)
    for steps in ranks:
        for of_predictions, of_gradients, _ in steps:
            assert of_predictions <= TOLERANCE[case.dtype], steps
            assert of_gradients <= TOLERANCE[case.dtype], steps
    if case.bags == "g1n2+g2n1":  # two samples and three bags, then one: every rank takes part in what all do
        for step in zip(*ranks, strict=True):
            assert 0 in {calls for *_, calls in step}, "a bag without sequences computes nothing"
            assert max(calls for *_, calls in step) > 0


@pytest.mark.parametrize(("bags", "samples"), [("g2n2", 3), ("g1n2+g2n1", 1)])
def test_int8_in_bags_is_near_one_by_one_without_gradients(pool, bags, samples):
    """Rejected on all ranks, also where a bag has nothing to attend to."""
    errors, said = zip(*pool(4).run(int8_in_bags, BagCase(bags, "dense", samples=(samples,), seed=3)), strict=True)
    assert 1e-6 < max(errors) < 0.02
    rejection = "precision: int8 has no gradients"
    assert all(rejection in one and "\n" not in one for one in said), said


def test_bag_with_another_layout_differs_from_one_by_one(pool):
    ranks = pool(4).run(in_bags, BagCase("g2n2", seed=1, broken=True))
    found = [step for steps in ranks for step in steps]
    assert max(of_predictions for of_predictions, _, _ in found) > 1e-3
    assert min(of_gradients for _, of_gradients, _ in found) > 1e-3


def test_attention_stays_within_the_bag(pool):
    for rank, (members, whole) in enumerate(pool(4).run(groups_of_attention, "g2n2")):
        assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert whole == [0, 1, 2, 3]


def test_tokens_per_rank_stay_within_max_tokens(pool):
    """Sequences of 24, 24 and 96 tokens: bags of two hold the last, and then none of the others, at 48 a rank."""
    for held in pool(4).run(tokens_held, {"topology": "g2n2", "max_tokens": 48}):
        assert held <= 48


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ranks", "make units of 3 ranks, which do not divide 2; 2 fit g1n2, g2n1"),
        ("text", "bags 'two' are not of the form gGnN"),
        ("differ", "bags differ on rank"),
        ("too long", "exceeds every bag of g1n2"),
        ("enable", "make units of 3 ranks"),
    ],
)
def test_bad_bags_are_rejected_on_all_ranks(pool, kind, message):
    assert_all_raise(pool, 2, message, bad_bags, kind)


def test_strategy_of_other_bags_is_rejected_on_all_ranks(pool):
    assert_all_raise(pool, 4, "strategy U4R1 is for 4 ranks, and bags g2n2 have 2", bad_bags, "strategy")
