"""Stress tests: a few cases of each part, and misbehaviour that they must find."""

from __future__ import annotations

import itertools
import json
import os
import pkgutil
import sys
from types import SimpleNamespace

import pytest
import torch

from scripts.checks.stress import engines_part
from scripts.checks.stress.engines_part import Engines
from scripts.checks.stress.faults import generating
from scripts.checks.stress.faults.fault_injection import Injection, reference
from scripts.checks.stress.faults.faults_part import Faults
from scripts.checks.stress.faults.keeper import start_keeper, wait_for
from scripts.checks.stress.faults.phases import PHASES
from scripts.checks.stress.features_part import Draw, Features
from scripts.checks.stress.frame import Outcome, Part, read_state, run_part
from scripts.checks.stress.oracle.cases import draw_case
from scripts.checks.stress.oracle.oracle_part import BOUNDS, Oracle, errors_of
from scripts.checks.stress.soak.generations import Generation
from scripts.checks.stress.soak.soak_part import Soak
from tests.scripts.fault_controls import HOW, Misbehaviour
from tests.simulated.feature_cases import Order, Together, together
from tests.support.oracle import largest_difference
from tests.support.programs import run, run_module
from tests.support.repository import child_environment


def test_part_with_a_new_seed_prints_the_seed(tmp_path):
    state = tmp_path / "state.json"
    words = ("--part", "fuzz", "--minutes", "0.01", "--seed", "new", "--state", state, "--json")
    done = run_module("scripts.checks.stress", *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["parts"]["fuzz"]["failures"] == 0
    assert found["parts"]["fuzz"]["cases"] > 0
    assert found == read_state(state, None)
    assert f"scripts/campaign --seed {found['seed']} --part fuzz --minutes 0.01\n" in done.stderr


class EverySeventh(Part):
    """Numbers, of which every seventh fails."""

    name = "sevens"
    together = 3
    most_tries = 9

    def draw(self, seed, number):
        return number

    def outcome(self, case):
        return Outcome(None if case % 7 else "it is a seventh", {"number": case})

    def smaller(self, case):
        yield from range(1, case)

    def close(self):
        self.closed = True


def test_failing_case_is_repeated_alone_and_made_smaller():
    part = EverySeventh()
    assert [part.repeat(3, number).failure for number in (14, 15)] == ["it is a seventh", None]
    assert part.closed
    assert (part.explain(3, 14), part.explain(3, 15)) == ("7", "15")


def test_second_run_continues_and_says_how_to_repeat_a_failure(tmp_path, capsys):
    path = tmp_path / "state.json"
    how = "scripts/campaign --case sevens:3:{0}   it is a seventh   {0}"
    for seed, done in ((3, 1), (None, 2), (3, 8)):  # new, any, the same
        state = read_state(path, seed)
        while state["parts"].get("sevens", {"cases": 0})["cases"] < done:
            run_part(EverySeventh(), state, path, 0.0)
        kept = read_state(path, None)
        assert (kept["seed"], kept["parts"]["sevens"]["cases"]) == (3, done)
        assert kept["parts"]["sevens"]["worst"] == {"number": done - 1}
    assert kept["failures"] == [how.format(0), how.format(7)]
    assert kept["parts"]["sevens"]["failures"] == 2
    assert capsys.readouterr().err.splitlines() == kept["failures"]
    assert read_state(path, 2)["parts"] == {}


@pytest.mark.long
def test_oracle_with_a_wrong_scale_finds_errors(pool):
    drawn = (draw_case(0, number) for number in itertools.count())
    cases = list(itertools.islice((case for case in drawn if case.world == 2), 4))
    right, wrong = (
        [max(one["output"] for one in pool(2).run(errors_of, case, scale)) for case in cases] for scale in (1.0, 1.2)
    )
    for case, fine, worse in zip(cases, right, wrong, strict=True):
        assert fine <= BOUNDS[case.dtype, "output"]
        assert worse > fine
    assert max(wrong) > 1e-2


def test_engines_with_steps_that_are_one_late_find_errors(pool):
    cases = [case for case in (Engines().draw(0, number) for number in range(40)) if case.world == 2]
    right, wrong = ([max(pool(2).run(engines_part.error_of, case, late)) for case in cases[:6]] for late in (0, 1))
    assert max(right) <= engines_part.BOUND
    assert max(wrong) > 1e-2


def test_nan_is_the_largest_difference_of_all():
    differs = largest_difference(torch.tensor([torch.nan, 0.0]), torch.zeros(2))
    assert max([0.0, differs]) == float("inf")


POSSIBLE = {
    Features: lambda one, case: 0 <= one.order.before <= len(one.order.features) <= len(case.order.features),
    Oracle: lambda one, case: one.possible,
    Engines: lambda one, case: all(request.first < request.end for request in one.requests),
    Faults: lambda one, case: one.processes <= 8,
    Soak: lambda one, case: one.steps > 0,
}
"""What must hold for a case or a smaller variant of it."""


@pytest.mark.parametrize("part", POSSIBLE)
def test_case_depends_on_seed_and_number_and_has_smaller_variants(part):
    for number in range(0, 800, 37):
        case = part().draw(3, number)
        assert case == part().draw(3, number)
        smaller = list(part().smaller(case))
        assert all(smaller.count(one) == 1 for one in smaller), "each costs seconds"
        assert case not in smaller
        assert all(POSSIBLE[part](one, case) for one in [case, *smaller])


def test_feature_that_breaks_is_found(monkeypatch):
    part, case = Features(), Draw(2, Order(("LoRA",), 1))
    by_rank = [
        Together(1e-7, 1.0, [2], [2], [], True),
        Together(1e-7, 1.0, [2], [1], ["hook: one, not two"], False),
    ]
    monkeypatch.setattr(part, "_ask", lambda _, function: by_rank if function is together else None)
    found = part.outcome(case).failure
    assert found == "ranks skip other blocks than one process; left: hook: one, not two; other bits after disable"


BAD = {
    "lambda: 1 / 0": "ZeroDivisionError",
    "lambda: exec('while True: pass')": "takes more than",
    "lambda: bytearray(3 << 30)": "MemoryError",
    "lambda: open('../elsewhere', 'w')": "it writes to",
    "lambda: os.system('true')": "it runs",
    "lambda: fail('two\\nlines')": "several lines",
    "lambda: fail('one line')": "None",
    "['report', 'nothing']": "None",
}
"""Inputs, and what is found wrong with them."""


def test_input_that_breaks_a_limit_is_found(tmp_path):
    (tmp_path / "inside").mkdir()
    script = (
        "from tests.support import interpreter\nimport os, pathlib\n"
        "from scripts.checks.stress.fuzz import guard\nguard.MOST_CPU_S = 0.5\n"
        "def fail(text): raise OSError(text)\n"
        f"folder = pathlib.Path({str(tmp_path / 'inside')!r})\nos.chdir(folder)\nwatch = guard.Guard(folder)\n"
        f"for call in [{', '.join(BAD)}]: print(watch.try_out(call)[0])"
    )
    done = run([sys.executable, "-c", script], env=child_environment())
    found = done.stdout.splitlines()
    assert len(found) == len(BAD), done.stderr
    for message, line in zip(BAD.values(), found, strict=True):
        assert message in line


@pytest.mark.long
def test_planted_leak_is_found_and_nothing_else():
    case = Generation(0, height=32, width=32, steps=1, seed=1)
    clean, leaking = Soak(cases=4), Soak(cases=4, leak=True)
    try:
        outcomes = [clean.outcome(case) for _ in range(12)]
        assert [one.failure for one in outcomes] == [None] * 12
        assert [len(one.measure) > 1 for one in outcomes] == [False] * 11 + [True]
        found = [leaking.outcome(case).failure for _ in range(12)]
        assert found[:-1] == [None] * 11
        assert all(f": 4 {name} more" in found[-1] for name in ("descriptors", "tensors"))
        assert all(f" {name} more" in found[-1] for name in ("objects", "MB in use"))
    finally:
        clean.close()
        leaking.close()


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="watches processes as Linux shows them")
def test_process_that_ends_wrongly_is_found(tmp_path):
    folders = {how: tmp_path / how.replace(" ", "-") for how in HOW}
    keepers = {how: start_keeper(Misbehaviour(how), folders[how]) for how in HOW}
    for how, (_, message) in HOW.items():
        found, _ = wait_for(keepers[how], folders[how])
        if how == "shared memory" and os.path.exists("/dev/shm/left"):  # it could not have one of its own
            os.unlink("/dev/shm/left")
            continue
        assert (found is None) == (message is None), (how, found)
        assert message is None or message in found, (how, found)


def test_functions_of_phases_exist():
    targets = [phase.target for phase in PHASES.values()]
    for target in targets + [target for _, target, _ in generating.PHASES.values()]:
        owner, _, name = target.rpartition(".")
        assert name in vars(pkgutil.resolve_name(owner)), target


def test_fault_happens_in_a_call_that_other_ranks_wait_for(tmp_path, monkeypatch):
    """Counts no call that a rank makes for its reference alone: a fault in that would rightly end no other rank."""
    owner = SimpleNamespace(call=lambda: None)
    monkeypatch.setattr(pkgutil, "resolve_name", lambda name: owner)
    Injection("raise", 0, "owner.call", 2).arm(0, tmp_path)
    owner.call()
    with reference():
        owner.call()
    with pytest.raises(RuntimeError, match="injected"):
        owner.call()


def test_faults_after_the_last_exchange_are_not_drawn():
    """Draws no call that rightly ends one rank alone: the third counts are read by `flush`."""
    titles = [str(Faults().draw(7, number)) for number in range(3000)]
    drawn = [title for title in titles if "in counts of the last call" in title]
    assert any("call 2" in title for title in drawn)
    assert not any("call 3" in title for title in drawn)
