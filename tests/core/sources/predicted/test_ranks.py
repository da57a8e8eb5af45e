"""Masks that are predicted together: any ranks, layout and strategy give the bits of one process, and one plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core import Strategy
from tests.core.sources.predicted import test_cube, test_sol, test_sparge, test_ssta, test_subblock, test_union
from tests.core.sources.predicted.sparge_cases import alone, predict_together

PREDICTED = {
    **{f"sparge, {name}": case for name, case in test_sparge.CASES.items() if name != "everything"},
    **{f"sol, {name}": case for name, case in test_sol.CASES.items()},
    **{f"cube, {name}": case for name, case in test_cube.CASES.items()},
    **{f"ssta, {name}": case for name, case in test_ssta.CASES.items()},
    **{f"subblock, {name}": case for name, case in test_subblock.CASES.items()},
    "union": test_union.CASES["window and predicted"],
    "nabla": test_union.NABLA,
}
WORLDS, LAYOUTS = (2, 3, 4, 6, 8), ("contiguous", "striped", "shuffled")


@pytest.mark.parametrize(("number", "name"), enumerate(PREDICTED))
def test_every_number_of_ranks_gives_identical_bits_and_plans(threads, number, name):
    world = WORLDS[number % 5]
    strategies = Strategy.all_for(world)
    case = replace(PREDICTED[name], layout=LAYOUTS[number % 3])
    answers = threads(world).run(predict_together, case, str(strategies[number % len(strategies)]))
    assert {mask for mask, _ in answers} == {alone(case).fingerprint}
    assert len({plan for _, plan in answers}) == 1
