"""Files, functions, calls (`-s` prints them) and collectives of a steady attention; host waits are in test_waits."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType

import pytest
import torch

import dbsp_core
import dbsp_kernels
from dbsp_core import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.reports.observer import observed_session
from tests.support.steady_cases import collectives
from tests.support.thread_ranks import ThreadRanks

ROOTS = tuple(os.path.dirname(package.__file__ or "") for package in (dbsp_core, dbsp_kernels))
SPARGE = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16}
WINDOW = {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}


def calls_of_a_steady_attention(rank: int, world: int, mask: dict[str, object]) -> Counter[tuple[str, str]]:
    """Returns how often rank 0 enters each (file, function) in the third step of one layer.

    Comprehensions, which are frames in some versions of Python, do not count.
    """
    config = DbspConfig.load({"mask": mask, "reuse": 100.0})
    session = observed_session(config, SequenceGroup.from_group(), Strategy.parse("U1R2"), heads=4, layers=1)
    calls: Counter[tuple[str, str]] = Counter()

    def note(frame: FrameType, event: str, _: object) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(ROOTS) and (name == "<lambda>" or not name.startswith("<")):
            calls[os.path.relpath(path, os.path.dirname(ROOTS[0])), frame.f_code.co_qualname] += 1

    for step in range(3):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        q, k, v = torch.randn(3, 1, 4, layout.shard, 16, generator=torch.Generator().manual_seed(step))
        if step == 2 and rank == 0:
            sys.setprofile(note)
        try:
            with torch.no_grad():
                session.attend(0, q, k, v)
        finally:
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    ("mask", "most_files", "most_functions", "most_calls"),
    [(SPARGE, 28, 101, 190), (WINDOW, 15, 54, 123)],
    ids=["predicted", "known"],
)
def test_a_steady_attention_enters_few_files_and_functions(mask, most_files, most_functions, most_calls):
    calls, _ = ThreadRanks(2).run(calls_of_a_steady_attention, mask)
    files = sorted({path for path, _ in calls})
    for path in files:
        print(path, *(f"{name} {number}" for (file, name), number in calls.items() if file == path), sep="\n    ")
    print(f"{len(files)} files, {len(calls)} functions, {calls.total()} calls")
    assert len(files) <= most_files
    assert len(calls) <= most_functions
    assert calls.total() <= most_calls


def collectives_of_a_steady_step(rank: int, world: int, settings: dict[str, object]) -> dict[str, int]:
    """Returns what the third step of one layer sends and receives, by name."""
    session = observed_session(DbspConfig.load(settings), SequenceGroup.from_group(), Strategy(1, world), 4, layers=1)
    for step in range(3):
        layout = session.begin(Video((4, 8, 8)), timestep=900.0 - step)
        with collectives() as seen:
            session.attend(0, *torch.randn(3, 1, 4, layout.shard, 16))
    return dict(seen)


@pytest.mark.parametrize(("mask", "comparisons"), [(SPARGE, 2), (WINDOW, 1)], ids=["predicted", "known"])
def test_comparisons_of_debug_cost_no_collective_without_it(pool, monkeypatch, mask, comparisons):
    """Compares by `all_gather`: one for all, or one for inputs and one for a predicted mask and its plan.

    Ranks that compare meet before each exchange, too, and at the end.
    """
    without = pool(3).run(collectives_of_a_steady_step, {"mask": mask, "reuse": 100.0})
    if mask is WINDOW:
        assert without == [{"all_to_all_single": 2 + 3 - 1}] * 3
    assert all("all_gather" not in seen for seen in without)
    monkeypatch.setenv("DBSP_DEBUG", "1")
    compared = pool(3).run(collectives_of_a_steady_step, {"mask": mask, "reuse": 100.0})
    assert compared == [seen | {"all_gather": comparisons + sum(seen.values()) + 1} for seen in without]
