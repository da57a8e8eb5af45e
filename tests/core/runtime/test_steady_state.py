"""Costs of a steady attention: collectives, frames, files; host waits are in tests/simulated/test_waits.py."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from tests.support.steady_cases import collectives_of_a_steady_step, files_of_a_steady_step

SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mask", [SPARGE, WINDOW], ids=["sparge", "window"])
def test_comparisons_of_debug_cost_no_collective_without_it(pool, monkeypatch, world, mask):
    """Compares by `all_gather`: one for all, or one for inputs and one for a predicted mask and its plan.

    Ranks that compare meet before each exchange, too, and at the end.
    """
    settings, strategy = {"mask": mask, "reuse": 100.0}, f"U1R{world}"
    without = pool(world).run(collectives_of_a_steady_step, settings, strategy)
    if mask is WINDOW:
        assert without == [{"all_to_all_single": 2 + world - 1}] * world
    assert all("all_gather" not in seen for seen in without)
    monkeypatch.setenv("DBSP_DEBUG", "1")
    compared = pool(world).run(collectives_of_a_steady_step, settings, strategy)
    comparisons = 1 if mask is WINDOW else 2
    assert compared == [seen | {"all_gather": comparisons + sum(seen.values()) + 1} for seen in without]


@pytest.mark.parametrize("strategy", ["U1R1", "U2R1", "U1R2"])
def test_few_files_carry_a_call_with_a_static_mask(pool, strategy):
    world = Strategy.parse(strategy).world
    for files in pool(world).run(files_of_a_steady_step, {"mask": WINDOW}, strategy):
        core = [path for path in files if "dbsp_core" in path]
        assert (len(core) <= 11, len(files) - len(core) <= 6) == (True, True), files
