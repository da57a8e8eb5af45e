"""A further way for keys to travel is one class: planned, routed, computed and modelled like the others."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from tests.core.comm.gathered_keys_cases import errors, modelled, travelling
from tests.support.attention_cases import Case

STRATEGIES = [(world, str(strategy)) for world in (2, 4) for strategy in Strategy.all_for(world)]
TOLERANCE = 1e-5


def case_for(strategy: str) -> Case:
    return Case(strategy, heads=3, tokens=203, text_tokens=11, layout="striped", keys="gathered", padded=True)


@pytest.mark.parametrize(("world", "strategy"), STRATEGIES)
def test_equals_dense_attention_forward_and_backward(threads, world, strategy):
    with travelling():
        found = threads(world).run(errors, case_for(strategy))
    assert max(error for of_rank in found for error in of_rank) <= TOLERANCE


def test_keys_that_are_not_sent_are_missed(threads):
    with travelling(wrong=True):
        found = threads(2).run(errors, case_for("U1R2"))
    assert max(error for of_rank in found for error in of_rank) > 1e-2


@pytest.mark.parametrize(("world", "strategy"), STRATEGIES)
def test_bytes_are_those_of_the_routes(world, strategy):
    sent, of_model, seconds = modelled(case_for(strategy))
    assert sent == of_model
    assert seconds > 0
