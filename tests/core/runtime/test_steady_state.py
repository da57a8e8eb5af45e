"""In the steady state an attention never waits for its device: no count, plan or size is read back."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from tests.support.steady_cases import (
    collectives_of_a_steady_step,
    files_of_a_steady_step,
    frames_of_a_steady_step,
    launches_of_a_steady_step,
    waits_of_a_steady_step,
)

SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_int8_in_exchanges_waits_for_nothing_and_launches_little(pool, strategy):
    """Allows for the mean of keys a sum, an exchange and arithmetic, and a launch of reading per chunk."""
    settings = {"mask": WINDOW, "precision": "int8"}
    assert pool(2).run(waits_of_a_steady_step, settings, strategy) == [{}] * 2
    chunks = Strategy.parse(strategy).ring
    for seen in pool(2).run(launches_of_a_steady_step, settings, strategy, 8, (4, 8, 8)):
        assert (seen["quantise_segments"], seen["restore_rows"]) == (3 + 2 * (chunks - 1), 1 + chunks)
        assert sum(seen.values()) <= 9 + 4 * chunks + 9 + (1 + chunks), seen


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("mask", [SPARGE, WINDOW], ids=["sparge", "window"])
def test_comparisons_of_debug_cost_no_collective_without_it(pool, monkeypatch, world, mask):
    """Compares by `all_gather`: one for all, or one for inputs and one for a predicted mask and its plan."""
    settings, strategy = {"mask": mask, "reuse": 100.0}, f"U1R{world}"
    without = pool(world).run(collectives_of_a_steady_step, settings, strategy)
    if mask is WINDOW:
        assert without == [{"all_to_all_single": 2 + world - 1}] * world
    assert all("all_gather" not in seen for seen in without)
    monkeypatch.setenv("DBSP_DEBUG", "1")
    compared = pool(world).run(collectives_of_a_steady_step, settings, strategy)
    assert compared == [seen | {"all_gather": 1 if mask is WINDOW else 2} for seen in without]


@pytest.mark.parametrize(
    ("heads", "thw"), [(8, (4, 8, 8)), (20, (3, 6, 10))], ids=["whole blocks", "blocks cut between ranks"]
)
def test_launches_are_few_for_any_heads_and_strategy(pool, heads, thw):
    """Counts launches outside the attention kernel, those fused on a GPU as one; see `steady_cases.FUSED`.

    Without a ring, queries may have an exchange of their own.
    """
    sparge, window = ({"mask": mask, "reuse": 100.0} for mask in (SPARGE, WINDOW))
    for strategy in map(Strategy.parse, ("U4R2", "U1R8")):  # others on simulated GPUs
        for seen in pool(8).run(launches_of_a_steady_step, sparge, str(strategy), heads, thw):
            assert seen["select_blocks"] == 1
            assert sum(seen.values()) <= 32 + 4 * (strategy.ring - 1), (strategy, seen)
        for seen in pool(8).run(launches_of_a_steady_step, window, str(strategy), heads, thw):
            assert sum(seen.values()) <= 5 + 4 * strategy.ring, (strategy, seen)


@pytest.mark.parametrize("mask", [SPARGE, WINDOW], ids=["sparge", "window"])
def test_steady_call_is_few_frames_deep(pool, mask):
    for strategy in ("U2R1", "U1R2"):
        assert max(pool(2).run(frames_of_a_steady_step, {"mask": mask}, strategy)) <= 20


@pytest.mark.parametrize("strategy", ["U1R1", "U2R1", "U1R2"])
def test_few_files_carry_a_call_with_a_static_mask(pool, strategy):
    world = Strategy.parse(strategy).world
    for files in pool(world).run(files_of_a_steady_step, {"mask": WINDOW}, strategy):
        core = [path for path in files if "dbsp_core" in path]
        assert (len(core) <= 10, len(files) - len(core) <= 6) == (True, True), files
