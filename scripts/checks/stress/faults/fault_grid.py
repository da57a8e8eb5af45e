"""Grid of all faults, and the fault that a case is."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass

from dbsp_core import Strategy
from scripts.checks.stress.faults.fault_injection import Injection
from scripts.checks.stress.faults.generating import GENERATIONS, SPARE_S
from scripts.checks.stress.faults.judging import ENDS, Expected
from scripts.checks.stress.faults.keeper import Task
from scripts.checks.stress.faults.phases import DIVERGENCES, MAKES_A_GROUP, PHASES, WRITERS, Divergence
from scripts.checks.stress.faults.programs import TIMEOUT_S, Ranks, Values, be_a_rank
from scripts.checks.stress.frame import WORLDS

EVERYWHERE = ("kill", "stop", "raise", "out of memory", "slow")
SOMEWHERE = {
    "interrupt": ("mask exchange: bits", "planning", "dispatch", "kernel: 2nd chunk", "combine", "backward: kernel"),
    "terminate": ("mask exchange: bits", "kernel: 2nd chunk", "combine", "report: gathering"),
    "out of CPU memory": ("planning", "planning: a new plan", "report: gathering", "attaching: session"),
    "hang": ("planning", "counts of the last call"),
    "disk full": WRITERS,
    "read-only": WRITERS,
}
"""Phases that further acts happen in."""
FROM_GRID = 0.5
"""Share of cases."""
DIVERGE = 0.25
"""Share of the others, on ranks of any number."""
CONNECTS_S = 5 * TIMEOUT_S
"""After which gloo gives up making a group with ranks that have gone: a rank that was stopped comes to that."""


@dataclass(frozen=True)
class Case:
    """title: in words;  task: what runs;  expected: how it ends"""

    title: str
    task: Task
    expected: Expected

    def __str__(self) -> str:
        return self.title


@functools.cache
def grid() -> tuple[Case, ...]:
    """Returns every act in every phase, every divergence with and without debug, and all of `dbsp generate`."""
    cases = [fault(name, act, world=3) for act in EVERYWHERE for name in PHASES]
    cases += [fault(name, act, world=2) for act, names in SOMEWHERE.items() for name in names]
    cases += [divergence(one, debug) for one in DIVERGENCES for debug in (True, False)]
    cases += [Case(name, one.task, Expected("elsewhere")) for name, one in GENERATIONS.items()]
    return tuple(cases)


def case_of(seed: int, number: int) -> Case:
    """Returns one of the grid, or on 2 to 8 ranks a divergence or a random moment of a random phase."""
    draw = random.Random(f"{seed}:{number}")
    if draw.random() < FROM_GRID:
        return draw.choice(grid())
    world = draw.choice(WORLDS)
    if draw.random() < DIVERGE:
        odd = draw.randrange(world) if world > 2 else 1  # of two ranks, the first is taken to be right
        return divergence(draw.choice(DIVERGENCES), draw.random() < 0.5, world, odd)
    name, act = draw.choice(list(PHASES)), draw.choice(EVERYWHERE)
    calls = PHASES[name].awaited or 3 * PHASES[name].nth
    return fault(name, act, world, draw.randrange(world), draw.randint(1, calls), draw)


def fault(
    name: str, act: str, world: int, odd: int = 1, nth: int | None = None, draw: random.Random | None = None
) -> Case:
    """Returns the case of one act in one phase. nth: in which of its calls; None: as the phase says"""
    phase = PHASES[name]
    odd = 0 if name in WRITERS else odd
    strategies = [str(one) for one in Strategy.all_for(world)]
    ring = phase.program == "attention" or draw is None
    strategy = f"U1R{world}" if ring or draw is None else draw.choice(strategies)
    values = Values(strategy, phase.settings)
    injection = Injection(act, odd, phase.target, nth or phase.nth)
    task = _task(Ranks(phase.program, world, values, injection, odd), odd if act == "stop" else None)
    how = "failure"
    if act == "slow":
        how = "success"
    elif phase.harmless and (name != "recording" or act not in ("kill", "stop", "terminate", "interrupt")):
        how = "harmless"
    title = f"{act} in {name}, call {injection.nth}, on rank {odd} of {world}, {strategy}"
    odd_limit = CONNECTS_S + SPARE_S if act == "stop" and name in MAKES_A_GROUP else 0.0
    silent = name in WRITERS and act in ("stop", *ENDS)
    return Case(title, task, Expected(how, odd, act, silent=silent, odd_limit_s=odd_limit))


def divergence(one: Divergence, debug: bool, world: int = 3, odd: int = 1) -> Case:
    """Returns the case of something that differs on one rank."""
    file = "whole" if "mask_file" in one.odd else ""
    values = Values(f"U1R{world}", {**one.settings, "debug": debug}, mask_file=file)
    given = dict(one.odd)
    if "settings" in given:
        changed = {key: not debug if value == "other" else value for key, value in given["settings"].items()}
        given["settings"] = {"debug": debug, **changed}
    if given.get("strategy") == "other":
        given["strategy"] = f"U{world}R1"
    ranks = Ranks(one.program, world, values, odd_rank=odd, odd=given, version=one.version)
    how = "quiet" if one.quiet and not debug else "failure"
    words = "" if one.later and not debug else f"rank(s) [{odd}]"
    return Case(f"{one} on rank {odd} of {world}, debug {debug}", _task(ranks), Expected(how, odd, "", words))


def _task(ranks: Ranks, stopped: int | None = None) -> Task:
    return Task(be_a_rank, ranks, ranks.world, TIMEOUT_S + SPARE_S, stopped, after_s=CONNECTS_S)
