"""Passes whose backward is over are neither kept nor taken for those that activation checkpointing recomputes."""

from __future__ import annotations

import pytest

from tests.core.runtime.recomputation_cases import (
    another_pass_between,
    checkpointing_turned_on_later,
    executors_alive,
    retained_graph,
)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_turned_on_during_training(threads, reentrant):
    assert max(threads(2).run(checkpointing_turned_on_later, reentrant)) <= 1e-5


def test_backward_twice_on_a_retained_graph(threads):
    assert max(threads(2).run(retained_graph, False)) <= 1e-6
    for rejection in threads(2).run(retained_graph, True):
        assert "checkpoint with use_reentrant=False to call it again on a retained graph" in rejection


def test_retained_graph_does_not_take_another_passs_masks(threads):
    for rejection in threads(2).run(another_pass_between):
        assert "2 forward passes with different masks wait for backward, or have retained graphs" in rejection


def test_executors_of_earlier_passes_are_freed(pool):
    for alive, own in pool(2).run(executors_alive):
        assert alive == own == 2
