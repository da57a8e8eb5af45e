"""Sol-Attn's routing: against its definition written out, and identical bits on every number of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from dbsp_core import Strategy
from dbsp_core.sources import LocalQK, SolSource
from tests.core.sources.predicted.sol_reference import predict
from tests.core.sources.predicted.sparge_cases import SpargeCase, predict_together

SolCase = partial(SpargeCase, kind=SolSource)
CASES = {
    "diag": SolCase(settings={}),
    "exact": SolCase(settings={"thresh_type": "exact", "tau": 0.5}),
    "text, batch of two": SolCase(text_tokens=21, batch=2, thw=(4, 5, 11), settings={"tau": 0.3}),
    "sink, small blocks": SolCase(settings={"tau": 1.2, "attention_sink": True, "block_q": 8, "block_k": 24}),
    "bfloat16": SolCase(dtype=torch.bfloat16, settings={"block_q": 16, "thresh_type": "exact"}),
    "tiles": SolCase(settings={"tau": 0.8, "token_order": "tile:2x4x4"}, thw=(4, 8, 9), heads=2),
    "below the mean": SolCase(settings={"tau": -0.7}),
}


def alone(case):
    return case.source.mask(case.request, LocalQK.alone(*case.tensors()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_its_definition(case):
    mask = alone(case)
    known = ("tau", "thresh_type", "attention_sink")
    settings = {key: value for key, value in case.settings.items() if key in known}
    expected, margins = predict(*case.by_head(), mask.grid, **settings)
    different = mask.bits.numpy() != expected
    assert not (different & (margins > 1e-5)).any()  # pooled numbers are rounded to 22 bits
    assert different.mean() < 0.001
    assert 0.1 < mask.density < 0.9


@pytest.fixture(scope="module")
def fingerprints():
    """Of the masks of one process, by case."""
    return {name: alone(case).fingerprint for name, case in CASES.items()}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", CASES)
def test_every_number_of_ranks_gives_identical_bits_and_plans(threads, fingerprints, world, name):
    """Layouts and strategies one after another."""
    strategies, number = Strategy.all_for(world), list(CASES).index(name) + world
    case = replace(CASES[name], layout=("contiguous", "striped", "shuffled")[number % 3])
    answers = threads(world).run(predict_together, case, str(strategies[number % len(strategies)]))
    assert {mask for mask, _ in answers} == {fingerprints[name]}
    assert len({plan for _, plan in answers}) == 1
