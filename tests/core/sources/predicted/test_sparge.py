"""SpargeAttn's predictor: against the paper written out, and identical bits on every number of ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core import Strategy
from dbsp_core.sources import LocalQK, head_shares
from dbsp_kernels.prediction import pool_rows, sum_tokens
from tests.core.sources.predicted.sparge_cases import SpargeCase, predict_together
from tests.core.sources.predicted.sparge_reference import predict
from tests.support.generators import SEEDS, examples
from tests.support.programs import run
from tests.support.repository import child_environment

CASES = {
    "cdf": SpargeCase(),
    "topk": SpargeCase(settings={"topk": 0.3, "similarity": -1.0}),
    "text, batch of two": SpargeCase(text_tokens=21, batch=2, thw=(4, 5, 11)),
    "sink, small blocks": SpargeCase(
        settings={"cdf": 0.5, "similarity": 0.1, "attention_sink": True, "block_q": 8, "block_k": 24}
    ),
    "bfloat16": SpargeCase(dtype=torch.bfloat16),
    "tiles": SpargeCase(settings={"cdf": 0.7, "similarity": 0.3, "token_order": "tile:2x4x4"}, thw=(4, 8, 9), heads=2),
    "everything": SpargeCase(settings={"cdf": 1.0, "similarity": -1.0}),
}


def alone(case):
    return case.source.mask(case.request, LocalQK.alone(*case.tensors()))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_follows_the_paper(case):
    mask = alone(case)
    settings = {
        key: value for key, value in case.settings.items() if key in ("cdf", "topk", "similarity", "attention_sink")
    }
    expected, margins = predict(*case.by_head(), mask.grid, **settings)
    different = mask.bits.numpy() != expected
    # Directions are counted in units of 2^-20: nothing may differ that was not that near to going the other way.
    near = (margins.chosen < 1e-9) | (margins.similar_q < 1e-5)[:, :, None] | (margins.similar_k < 1e-5)[:, None]
    assert not (different & ~near).any()
    assert different.mean() < 0.001


@pytest.mark.parametrize("at_once", [1, 1000], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_chosen_in_parts_they_are_the_same(case, at_once, monkeypatch):
    """Some heads at a time."""
    whole = alone(case)
    monkeypatch.setitem(head_shares.PAIRS_AT_ONCE, "cpu", at_once)
    assert torch.equal(alone(case).bits, whole.bits)


def test_the_cases_are_worth_comparing():
    """Neither full nor empty, with vague blocks and without: or else agreement would mean little."""
    densities = {name: alone(case).density for name, case in CASES.items()}
    assert all(0.15 < density < 0.9 for name, density in densities.items() if name != "everything"), densities
    assert densities["everything"] == 1
    case = CASES["cdf"]
    unvague = alone(replace(case, settings={**case.settings, "similarity": -1.0}))
    assert (alone(case).bits & ~unvague.bits).any()


@pytest.mark.long
def test_agrees_with_xfusers_own_predictor():
    if not all(map(importlib.util.find_spec, ("triton", "xfuser"))):
        pytest.skip("needs triton and xfuser")
    command = [sys.executable, "-m", "tests.core.sources.predicted.sparge_twin"]
    environment = child_environment() | {"TRITON_INTERPRET": "1"}
    done = run(command, env=environment)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["kernel equals torch"] == [True] * 8
    for result in answer["cases"]:
        assert 0.15 < result["density"] < 0.9
        assert result["unexplained"] == 0, result
        assert result["near"] < 0.2, "too many decisions that could go either way: nothing is compared"


@pytest.fixture(scope="module")
def fingerprints():
    """Of the masks of one process, by case."""
    return {name: alone(case).fingerprint for name, case in CASES.items()}


def assert_identical(ranks, name, layout, strategy, fingerprints):
    answers = ranks.run(predict_together, replace(CASES[name], layout=layout), strategy)
    assert {mask for mask, _ in answers} == {fingerprints[name]}, (layout, strategy)
    assert len({plan for _, plan in answers}) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("name", [name for name in CASES if name != "everything"])
def test_every_number_of_ranks_gives_identical_bits_and_plans(threads, fingerprints, world, name):
    """Layouts and strategies one after another."""
    strategies, number = Strategy.all_for(world), list(CASES).index(name) + world
    layout = ("contiguous", "striped", "shuffled")[number % 3]
    assert_identical(threads(world), name, layout, str(strategies[number % len(strategies)]), fingerprints)


@pytest.mark.parametrize("name", [name for name in CASES if name != "everything"])
def test_processes_give_identical_bits_and_plans(pool, fingerprints, name):
    assert_identical(pool(4), name, "shuffled", "U2R2", fingerprints)


def sums(tokens, block, blocks):
    place = torch.argsort(block, stable=True)
    first = torch.searchsorted(block[place], torch.arange(blocks + 1))
    return sum_tokens(tokens, place, first)


@examples(60)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), SEEDS)
def test_sums_are_the_same_however_tokens_are_distributed(count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, 3, count, width, generator=generator) * torch.logspace(-6, 3, count)[:, None]
    tokens = tokens.to(dtype)
    block = torch.randint(0, 3, (count,), generator=generator)
    owner = torch.randint(0, 4, (count,), generator=generator)
    apart = [sums(tokens[:, :, owner == rank], block[owner == rank], 3) for rank in range(4)]
    with mock.patch("dbsp_kernels.prediction.TOKENS_AT_A_TIME", 7):  # blocks longer than that, too
        assert torch.equal(sum(apart), sums(tokens, block, 3))


def test_pooling_is_a_mean_and_a_mean_cosine():
    tokens = torch.randn(1, 1, 10, 8, generator=torch.Generator().manual_seed(0))
    pooled = pool_rows(sums(tokens, torch.zeros(10, dtype=torch.long), 1), torch.tensor([10]))[0, 0, 0]
    unit = torch.nn.functional.normalize(tokens[0, 0].double(), dim=-1)
    assert torch.allclose(pooled[:-1], tokens[0, 0].mean(0), atol=1e-7)
    assert abs(pooled[-1].item() - float((unit @ unit.T).mean())) < 1e-5


def test_values_that_are_not_finite_do_no_harm():
    """They give a useless video, but the ranks must still agree on a mask."""
    q, k = CASES["cdf"].tensors()
    q[0, 0, 0, 0], k[0, 1, 5] = torch.nan, torch.inf
    first, second = (CASES["cdf"].source.mask(CASES["cdf"].request, LocalQK.alone(q, k)) for _ in range(2))
    assert first.fingerprint == second.fingerprint
