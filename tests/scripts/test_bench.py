"""Benchmarks print what they promise; ranks compute alternately, and those that fail are reported."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import start_processes

from scripts.bench import attention, timing
from scripts.bench.attention import slowest_rank
from scripts.bench.timing import Turns, TurnTakingGroup, run_ranks
from tests.support.programs import output_of
from tests.support.workers import PRELOADED


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Forks ranks from a process that has imported torch, which takes seconds for each that is spawned."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))

    def started(*arguments, start_method, **options):
        return start_processes(*arguments, start_method="forkserver", **options)

    monkeypatch.setattr(timing, "start_processes", started)


SMALL = ("--tokens", "512", "--heads", "2", "--head-dim", "16", "--repeats", "1", "--json")


def test_attention_is_timed_under_both_plans(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["attention", "--ranks", "2", *SMALL])
    attention.main()
    report = json.loads(capsys.readouterr().out)
    assert report["label"] == "measured, 2 ranks"
    assert [case["strategy"] for case in report["cases"]] == ["U2R1", "U1R2"]
    for case in report["cases"]:
        assert case["rho_before"] >= case["rho"] >= 1
        assert case["speedup"] == case["seconds_before"] / case["seconds"]


def intervals_of_turns(rank: int, world: int, folder: str) -> tuple[float, list[tuple[float, float]]]:
    """Computes before and after an all-to-all. Returns the seconds counted, and from when to when each half ran."""
    turns = Turns(Path(folder, "turns"))
    group = TurnTakingGroup.of_all(turns)
    ran: list[tuple[float, float]] = []

    def compute() -> None:
        start = time.monotonic()
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        ran.append((start, time.monotonic()))

    def action() -> None:
        compute()
        received = group.all_to_all(torch.full((world,), float(rank)), [1] * world, [1] * world)
        assert received.tolist() == list(range(world))
        compute()

    return turns.core_seconds(action), ran


def test_ranks_in_turns_compute_one_at_a_time_and_waiting_does_not_count(tmp_path):
    answers = run_ranks(intervals_of_turns, 2, "cpu", str(tmp_path))
    ran = sorted(interval for _, intervals in answers for interval in intervals)
    assert len(ran) == 4
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ran))
    assert all(seconds >= 0.1 for seconds, _ in answers)
    seconds, intervals = max(answers, key=lambda one: one[1][-1][1] - one[1][0][0])
    assert seconds < intervals[-1][1] - intervals[0][0] - 0.04, "the rank whose turn was first waits for the other's"


def test_slowest_rank_counts_by_its_median():
    assert slowest_rank([[[1.0, 9.0, 2.0], [5.0, 5.0, 5.0]], [[3.0, 1.0, 1.0], [4.0, 7.0, 6.0]]]) == [2.0, 6.0]


def fail_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise KeyError("the second rank's own fault")


def die_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os._exit(3)


@pytest.mark.parametrize(
    ("function", "message"), [(fail_on_one, "the second rank's own fault"), (die_on_one, "rank 1 ended")]
)
def test_rank_that_fails_or_dies_is_reported(function, message):
    with pytest.raises(RuntimeError, match=message):
        run_ranks(function, 2, "cpu")


def test_rounding_errors_in_exchanges():
    found = json.loads(output_of("scripts.bench.rounding_error", "--tokens", 512, "--heads", 1, "--json"))
    for errors in found["relative_errors"].values():
        assert errors["fp8 e4m3"] > 3 * errors["int8, k less its mean"] > 5e-3
