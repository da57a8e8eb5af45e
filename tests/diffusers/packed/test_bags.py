"""Sequences distributed over bags of ranks: exactly as one by one, forward and backward, for any bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_diffusers import PackedSample, packed_forward_local
from tests.diffusers.packed.packed_model_cases import CONFIGS, PackedCase, alone, compare, differences, make_model
from tests.support.gradients import wide_floats
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.outcomes import said, share_apart
from tests.support.workers import assert_all_raise

SEVERAL: dict[str, Any] = {"mask": "sparge", "samples": (2, 1), "seed": 8, "fsdp": True, "checkpointing": True}


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (4, PackedCase("g1n2+g2n1", **SEVERAL)),
        (4, PackedCase("g2n2", "dense", (3, 2), 14, False, model="hunyuan", planner="contiguous", brief=True)),
        (2, PackedCase("g2n1", samples=(3, 3), seed=14, moved=True)),  # the same sizes in another layout
        pytest.param(4, PackedCase("g1n4", samples=(2,), model="wan-lora"), marks=pytest.mark.long),
        pytest.param(4, PackedCase("g1n2+g2n1", **SEVERAL, model="flux"), marks=pytest.mark.long),
        pytest.param(6, PackedCase("g1n2+g4n1", samples=(3, 20), seed=12), marks=pytest.mark.long),
    ],
    ids=lambda value: f"{value.model} {value.bags}" if isinstance(value, PackedCase) else str(value),
)
def test_samples_in_bags_equal_one_by_one(pool, world, case):
    ranks = pool(world).run(compare, case)
    if case.bags == "g1n2+g2n1":  # two samples and three bags, then one: every rank takes part in what all do
        for calls in zip(*ranks, strict=True):
            assert 0 in calls, "a bag without sequences computes nothing"
            assert max(calls) > 0


def test_bag_with_another_layout_differs_from_one_by_one(pool):
    ranks = pool(4).run(differences, PackedCase("g2n2", samples=(3, 2), seed=1, broken=True))
    found = [step for steps in ranks for step in steps]
    assert max(of_predictions for of_predictions, _, _ in found) > 1e-3
    assert min(of_gradients for _, of_gradients, _ in found) > 1e-3


def int8_in_bags(rank: int, world: int, case: PackedCase) -> float:
    """Returns the largest difference of predictions whose samples were sent as int8, as a share of the largest."""
    with wide_floats(case.dtype):
        transformer = make_model(case.model, case.dtype)
        dbsp_diffusers.enable(transformer, case.config | {"precision": "int8"})
        samples, loaders = case.step(0, world)
        mine = [one for one, loader in enumerate(loaders) if loader == rank]
        own, expected = [samples[one] for one in mine], alone(case, 0, world)[0]
        answer = said(lambda: packed_forward_local(transformer, own, bags=case.bags))
        assert "precision: int8 does not support gradients" in answer
        assert "\n" not in answer
        with torch.no_grad():
            found = packed_forward_local(transformer, own, bags=case.bags).samples
        dbsp_diffusers.disable(transformer)
    return max((share_apart([a], [expected[one]]) for a, one in zip(found, mine, strict=True)), default=0.0)


def test_int8_in_bags_is_near_one_by_one_without_gradients(pool):
    """Expects rejections on all ranks, also where a bag has nothing to attend to."""
    assert 1e-6 < max(pool(4).run(int8_in_bags, PackedCase("g1n2+g2n1", "dense", samples=(1,), seed=3))) < 0.02


def _sample(*thw: int) -> PackedSample:
    t, h, w = thw
    return PackedSample(torch.randn(4, t, 2 * h, 2 * w), torch.tensor(500.0), torch.randn(3, 16))


def groups_of_attention(rank: int, world: int) -> None:
    """Compares the ranks in which a bag attends with those that distribute sequences."""
    transformer = make_tiny_transformer("wan")
    session = dbsp_diffusers.enable(transformer, {"mask": CONFIGS["dense"]})
    found = packed_forward_local(transformer, [_sample(1, 4, 6)], bags="g2n2")
    assert found.session is not None
    members, whole = (dist.get_process_group_ranks(one.group.group) for one in (found.session, session))
    assert members == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert whole == [0, 1, 2, 3]
    packed_forward_local(transformer, [_sample(2, 4, 6)], bags="g2n2")
    again = packed_forward_local(transformer, [_sample(1, 4, 6)], bags="g2n2")
    assert again.session is found.session, "groups and sessions are made once"
    dbsp_diffusers.disable(transformer)


def test_attention_stays_within_the_bag(pool):
    pool(4).run(groups_of_attention)


def bad_bags(rank: int, world: int, bags: list[Any], in_config: bool, config: dict[str, Any]) -> None:
    """Gives each rank bags; raises on all ranks, and leaves them together."""
    transformer = make_tiny_transformer("wan")
    try:
        own = {"bags": bags[rank]} if in_config else {}
        dbsp_diffusers.enable(transformer, {"mask": CONFIGS["dense"]} | config | own)
        packed_forward_local(transformer, [_sample(1, 4, 6)], bags=bags[rank])
    finally:
        dist.barrier()
        dbsp_diffusers.disable(transformer)


@pytest.mark.parametrize(
    ("bags", "in_config", "config", "message"),
    [
        (["g3n1"] * 2, False, {}, "make units of 3 ranks, which do not divide 2; for 2 ranks use g1n2, g2n1"),
        (["two"] * 2, False, {}, "bags 'two' are not of the form gGnN"),
        (["g2n1", "g1n2"], False, {}, "setting bags differs on rank"),
        ([{"topology": "g1n2", "max_tokens": 20}] * 2, False, {}, "exceeds every bag of g1n2"),
        (["g3n1"] * 2, True, {}, "make units of 3 ranks"),
        (["g2n2"] * 4, False, {"strategy": "U4R1"}, "strategy U4R1 is for 4 ranks, but bags g2n2 have 2"),
    ],
    ids=["ranks", "text", "differ", "too long", "enable", "strategy"],
)
def test_bad_bags_are_rejected_on_all_ranks(pool, bags, in_config, config, message):
    assert_all_raise(pool, len(bags), message, bad_bags, bags, in_config, config)
