"""Several sequences in one attention: each as if it were alone, forward and backward, from loaders and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_core import Strategy
from tests.core.sequences.packed_cases import PackedCase, run_packed, run_page
from tests.support.repository import ROOT
from tests.support.thread_ranks import ThreadRanks
from tests.support.workers import WorkerPool

WORLDS = (2, 3, 4, 6)
LAYOUTS = ("striped", "contiguous", "loaders")


def cases_for(world: int, strategy: Strategy) -> list[PackedCase]:
    cases = []
    for seed in range(4):
        dtype = torch.float64 if seed % 2 else torch.float32
        case = PackedCase(str(strategy), 7 * world + seed, LAYOUTS[seed % 3], seed == 3, dtype)
        cases.append(replace(case, dense_parts=seed == 2))
    return cases


def assert_as_if_alone(ranks: WorkerPool | ThreadRanks, cases: list[PackedCase]) -> None:
    for case, *errors in zip(cases, *ranks.run(run_packed, cases), strict=True):
        assert max(map(max, errors)) <= (1e-5 if case.dtype == torch.float32 else 1e-12), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(w, s) for w in WORLDS for s in Strategy.all_for(w)], ids=str)
def test_every_sequence_is_as_if_alone(threads, world, strategy):
    """Dense, window, radial, predicted and random masks; with text and without; ranks without sequences."""
    assert_as_if_alone(threads(world), cases_for(world, strategy))


@pytest.mark.parametrize("world", WORLDS)
def test_every_sequence_is_as_if_alone_on_processes(pool, world):
    """Each strategy with another case."""
    ways = enumerate(Strategy.all_for(world))
    assert_as_if_alone(pool(world), [cases_for(world, strategy)[row] for row, strategy in ways])


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_the_triton_kernel(pool, strategy):
    pytest.importorskip("triton")
    errors = pool(2).run(run_packed, [PackedCase(strategy, 8, kernel="triton", first=(2, 5, 8))])
    assert max(max(one[0]) for one in errors) <= 1e-5


def test_a_token_that_attends_into_another_sequence_would_be_found(threads):
    case = PackedCase("U2R1", 4, sabotage="a token attends into another sequence")
    assert max(max(one[0]) for one in threads(2).run(run_packed, [case])) > 1e-3


@pytest.mark.parametrize("world", [2, 4])
def test_the_page_runs_as_printed(pool, world):
    page = (ROOT / "docs" / "packed-sequences.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    for found in pool(world).run(run_page, code):
        assert found["error"] <= 1e-5
        assert found["gradient"]
        if world == 4:
            assert (round(found["rho"], 2), round(found["before"], 2)) == (1.01, 1.53), "as the page says"
