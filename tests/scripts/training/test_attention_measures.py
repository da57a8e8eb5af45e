"""What is measured of attention, on scores whose answer is known."""

from __future__ import annotations

import pytest
import torch

from scripts.training.trained_model.attention_measures import (
    best_keys,
    critical_keys,
    fits,
    held_by_top,
    located,
    near,
    neighbours,
    observe,
    shared,
)

THW = (4, 4, 6)
TOKENS = 4 * 4 * 6


@pytest.mark.parametrize(
    ("curve", "best"),
    [
        (lambda rank: -1.5 * rank.log(), 0),
        (lambda rank: -0.03 * rank, 1),
        (lambda rank: 2 * torch.special.ndtri(1 - (rank - 0.5) / 1000), 2),
    ],
    ids=["power law", "exponential", "log-normal"],
)
def test_each_curve_is_told_from_the_others(curve, best):
    ranked = curve(torch.arange(1, 1001).double()).float().expand(3, -1)
    *found, exponent = fits(ranked)
    assert found[best] == pytest.approx(1, abs=1e-4)
    assert max(value for place, value in enumerate(found) if place != best) < 0.97
    if best == 0:
        assert exponent == pytest.approx(1.5, abs=1e-4)


def test_scores_that_are_all_alike_do_not_count_in_a_fit():
    ranked = torch.stack([torch.zeros(200), -torch.arange(1, 201).log()])
    assert fits(ranked)[0] == pytest.approx(1, abs=1e-5)


def test_critical_keys_are_the_fewest_that_hold_nine_tenths():
    scores = torch.tensor([[0.05, 0.5, 0.3, 0.15], [0.25, 0.25, 0.25, 0.25], [0.95, 0.03, 0.01, 0.01]])
    assert critical_keys(scores).tolist() == [
        [False, True, True, True],
        [True, True, True, True],
        [True, False, False, False],
    ]
    held = held_by_top(torch.full((2, 100), 0.01))
    assert [one.tolist() for one in held] == [pytest.approx([share] * 2) for share in (0.01, 0.05, 0.1, 0.2, 0.3)]


def test_best_keys_are_a_tenth_of_all():
    scores = torch.rand(5, 40, generator=torch.Generator().manual_seed(0))
    best = best_keys(scores)
    assert best.sum(-1).tolist() == [4] * 5
    assert torch.where(best, scores, 1).amin() > 0
    for row, chosen in zip(scores, best, strict=True):
        assert row[chosen].min() > row[~chosen].max()


def test_planted_places_are_found_and_all_keys_give_chance():
    places = near(THW)
    for name, place in places.items():
        if name != "far":  # nothing is, in so small a video
            found = dict(zip(places, located(place, places), strict=True))
            assert found[name] == 1
    everything = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    assert located(everything, places) == pytest.approx([float(place.float().mean()) for place in places.values()])
    assert not places["far"].any()
    assert near((1, 1, 20))["far"].sum() == 2 * sum(range(1, 10))


def test_a_token_s_surroundings_are_counted():
    middle = 1 * 24 + 1 * 6 + 2
    places = near(THW)
    assert places["around"][middle].sum() == 27
    assert places["around"][0].sum() == 8
    assert places["order"][middle].sum() == 11


def test_planted_sharing_is_found():
    pairs = neighbours(THW)
    assert pairs["cube"].sum(-1).tolist() == [7] * TOKENS
    assert pairs["group"].sum(-1).unique().tolist() == [15, 31], "columns 4 and 5 are a group that is cut"
    assert pairs["next"].sum() == TOKENS - 1
    chosen = pairs["cube"] | torch.eye(TOKENS, dtype=torch.bool)  # each cube its own keys
    found = dict(zip(pairs, shared(chosen, pairs), strict=True))
    assert found["cube"] == 1
    assert found["any"] == pytest.approx(7 / (TOKENS - 1))
    assert found["group"] < 0.5


def test_a_query_that_shares_half():
    chosen = torch.tensor([[True, True, False, False], [True, False, False, False]])
    first_of_second = torch.tensor([[False, True], [False, False]])
    assert shared(chosen, {"first": first_of_second, "second": first_of_second.T}) == [0.5, 1.0]


def test_attention_to_oneself_is_local_sparse_and_not_shared():
    one_hot = 30 * torch.eye(TOKENS)[None]
    (head,) = observe(one_hot, one_hot, 1.0, THW)
    assert head.density == pytest.approx(1 / TOKENS)
    assert (head.concentrated, head.order, head.radius, head.around) == (1, 1, 1, 1)
    assert (head.next, head.cube, head.any) == (0, 0, 0)
