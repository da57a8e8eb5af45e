"""Stress tests: cases of each part, and failures that they must find."""

from __future__ import annotations

import itertools
import json
import pkgutil
from types import SimpleNamespace

import pytest

from scripts.checks.stress import __main__ as campaign
from scripts.checks.stress.cases import draw_case
from scripts.checks.stress.faults import RankEnd, RankFault, failure_of, inject, run_ranks
from scripts.checks.stress.oracle import BOUNDS, errors_of
from scripts.checks.stress.part import Outcome, Part
from scripts.checks.stress.phases import PHASES
from scripts.checks.stress.programs import Values, reference
from tests.support.programs import run_module


def test_part_with_a_new_seed_prints_the_seed():
    done = run_module("scripts.checks.stress", *["--part", "oracle", "--minutes", "0.01", "--seed", "new", "--json"])
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["parts"]["oracle"]["failures"] == []
    assert printed["parts"]["oracle"]["cases"] > 0
    assert f"scripts/campaign --seed {printed['seed']} --part oracle --minutes 0.01\n" in done.stderr


class EverySeventh(Part):
    """Numbers, of which every seventh fails."""

    def draw(self, seed, number):
        return number

    def outcome(self, case):
        return Outcome(None if case % 7 else "it is a seventh", {"number": case})


def test_failure_is_printed_with_the_command_that_repeats_it(monkeypatch, capsys):
    numbers = campaign.run_part("sevens", EverySeventh(), 3, 0.01)
    expected = [f"scripts/campaign --case sevens:3:{n}   it is a seventh   {n}" for n in range(0, numbers["cases"], 7)]
    assert numbers["failures"] == expected
    assert numbers["worst"] == {"number": numbers["cases"] - 1}
    assert capsys.readouterr().err.splitlines() == expected
    monkeypatch.setattr(campaign, "part_named", lambda name: EverySeventh())
    assert [campaign.repeat("sevens", 3, number) for number in (14, 15)] == [1, 0]
    assert capsys.readouterr().out == "it is a seventh {'number': 14}\n14\npassed {'number': 15}\n15\n"


@pytest.mark.long
def test_oracle_with_a_wrong_scale_finds_errors(pool):
    drawn = (draw_case(0, number) for number in itertools.count())
    cases = list(itertools.islice((case for case in drawn if case.world == 2), 4))
    right, wrong = (
        [max(errors["output"] for errors in pool(2).run(errors_of, case, scale)) for case in cases]
        for scale in (1.0, 1.2)
    )
    for case, error, error_of_wrong_scale in zip(cases, right, wrong, strict=True):
        assert error <= BOUNDS[case.dtype, "output"]
        assert error_of_wrong_scale > error
    assert max(wrong) > 1e-2


def test_functions_of_phases_exist():
    for phase in PHASES.values():
        owner, _, name = phase.target.rpartition(".")
        assert name in vars(pkgutil.resolve_name(owner)), phase.target


def test_fault_happens_in_a_call_that_other_ranks_wait_for(tmp_path, monkeypatch):
    owner = SimpleNamespace(call=lambda: None)
    monkeypatch.setattr(pkgutil, "resolve_name", lambda name: owner)
    inject("raise", "owner.call", 2, tmp_path / "fired")
    owner.call()
    with reference():
        owner.call()
    assert not (tmp_path / "fired").exists()
    with pytest.raises(RuntimeError, match="injected"):
        owner.call()


RAISED, KILLED, SLOW = (RankFault("attention", Values(), 2, 1, act, "f") for act in ("raise", "kill", "slow"))
DIFFERS = RankFault("attention", Values(), 2, 1, differs={"seed": 1}, named=True)
NAMED = RankEnd("UserError: rank(s) [1]: they have another mask", fired=True)
BROKE_OFF = RankEnd("CommunicationError: communication between the ranks of the sequence broke off", fired=True)
INJECTED = RankEnd("RuntimeError: injected: a fault", fired=True)


@pytest.mark.parametrize(
    ("case", "ends", "failure"),
    [
        (RAISED, [BROKE_OFF, INJECTED], None),
        (RAISED, [None, INJECTED], "rank 0 hangs"),
        (RAISED, [RankEnd(None, fired=True), INJECTED], "rank 0 does not fail"),
        (RAISED, [RankEnd("RuntimeError: Connection reset", fired=True), INJECTED], "rank 0 says 'RuntimeError"),
        (RAISED, [BROKE_OFF, BROKE_OFF], "rank 1 does not say what was raised"),
        (RAISED, [RankEnd(None), RankEnd(None)], None),
        (KILLED, [BROKE_OFF, RankEnd("exit code -9", fired=True)], None),
        (KILLED, [BROKE_OFF, RankEnd("exit code -6", fired=True)], "rank 1 was not killed: exit code -6"),
        (SLOW, [RankEnd(None, 1e-6), RankEnd(None, 1e-6, fired=True)], None),
        (SLOW, [RankEnd(None, 1e-6), RankEnd(None, 1e-3, fired=True)], "rank 1 ends with None, wrong by 0.001"),
        (SLOW, [BROKE_OFF, RankEnd(None, fired=True)], "rank 0 ends with CommunicationError"),
        (DIFFERS, [NAMED, NAMED], None),
        (DIFFERS, [NAMED, BROKE_OFF], "should name rank 1 before any"),
        (DIFFERS, [RankEnd(NAMED.error, calls=1), NAMED], "after 1 calls"),
    ],
)
def test_rank_that_ends_wrongly_is_found(case, ends, failure):
    found = failure_of(case, ends)
    assert found is None if failure is None else failure in found


@pytest.mark.long
def test_error_and_death_of_a_rank_reach_the_other(tmp_path):
    target = "dbsp_core.runtime.chunk_attention.block_attention"
    for act in ("raise", "kill"):
        case = RankFault("attention", Values("U1R2"), 2, 1, act, target, 3)
        (tmp_path / act).mkdir()
        ends = run_ranks(case, tmp_path / act)
        assert failure_of(case, ends) is None
        assert "broke off" in ends[0].error
