"""The parallel strategy UxRy."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy


@pytest.mark.parametrize("text", ["U4R2", "u4r2", " U4R2\n", Strategy(4, 2)])
def test_parse_reads_any_case(text):
    assert Strategy.parse(text) == Strategy(ulysses=4, ring=2)


@pytest.mark.parametrize("text", ["", "U4", "R2U4", "U4xR2", "U-4R2", "U4R2R2", "U4.0R2"])
def test_text_of_another_form_raises_with_an_example(text):
    with pytest.raises(ValueError, match="not of the form UxRy, for example U4R2"):
        Strategy.parse(text)


def test_strategies_of_a_world_are_listed_ulysses_first():
    assert [str(s) for s in Strategy.all_for(6)] == ["U6R1", "U3R2", "U2R3", "U1R6"]
    assert [str(s) for s in Strategy.all_for(7)] == ["U7R1", "U1R7"]
    assert [str(s) for s in Strategy.all_for(1)] == ["U1R1"]


def test_strategy_for_another_world_raises_with_those_that_fit():
    Strategy(4, 2).require_world(8)
    with pytest.raises(ValueError, match="needs 4·2 = 8 GPUs, got 6; use one of U6R1, U3R2, U2R3, U1R6"):
        Strategy(4, 2).require_world(6)
