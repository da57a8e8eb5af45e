"""Faults on one rank of 2 to 8: every other rank ends too, with one clear error.

Each case has processes of its own, which end with it: what ends a rank closes its connections.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pkgutil
import random
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from dbsp_core import Strategy
from scripts.checks.stress import programs
from scripts.checks.stress.part import Outcome, Part, in_one_line
from scripts.checks.stress.phases import DIVERGENCES, HARMLESS, PHASES
from scripts.checks.stress.programs import Values

WORLDS = (2, 2, 3, 3, 4, 4, 5, 6, 7, 8)  # numbers of ranks to draw from, where more than a few take long
TIMEOUT_S = 10.0  # of the process group
LIMIT_S = 180.0  # after which ranks that still run hang; gloo connects for five timeouts, and importing takes seconds
SLOW_S = 1.5
TOLERANCE = 1e-5
ACTS = ("raise", "kill", "slow")
DIVERGE = 0.3  # share of the cases in which a value differs on one rank
PRELOADED = (
    "tests.support.interpreter",  # before anything else imports triton
    "torch._dynamo",
    "diffusers.models.transformers.transformer_wan",
    "scripts.checks.stress.faults",
    "tests.support.models.tiny_transformers",
)
CLEAR = ("communication between the ranks of the sequence broke off", "injected", "rank(s) [", "not all ranks came")
"""A rank that lives on must say one of them."""
SIZES_DIFFER = "Received data size doesn't match expected size"
"""What gloo says if a rank is sent more than it expects."""


@dataclass(frozen=True)
class RankFault:
    """Something that goes wrong on one rank."""

    program: str  # in `programs.PROGRAMS`
    values: Values
    world: int
    odd: int  # the rank that it happens to
    act: str = ""  # one of ACTS, in call `nth` of function `target`; "": a value differs
    target: str = ""
    nth: int = 1
    harmless: bool = False
    differs: Mapping[str, Any] = field(default_factory=dict)  # fields of `Values`
    named: bool = False  # whether all ranks name the odd one before an attention is done
    quiet: bool = False  # whether the fault may go unseen

    def __str__(self) -> str:
        what = f"{self.act} in call {self.nth} of {self.target}" if self.act else f"{dict(self.differs)}"
        return f"{self.program}: {what} on rank {self.odd} of {self.world}, {self.values}"


@dataclass(frozen=True)
class RankEnd:
    """End of a rank. fired: whether the injected act has happened;  calls: that returned before the end"""

    error: str | None
    difference: float = 0.0
    calls: int = 0
    fired: bool = False


class Faults(Part):
    """Faults of processes that are forked for each case."""

    def draw(self, seed: int, number: int) -> RankFault:
        draw = random.Random(f"{seed}:{number}")
        world = draw.choice(WORLDS)
        if draw.random() < DIVERGE:
            odd = draw.randrange(world) if world > 2 else 1  # of two ranks, the first is taken to be right
            divergence, debug = draw.choice(DIVERGENCES), draw.random() < 0.5
            other = {"strategy": f"U{world}R1", "debug": not debug}
            differs = {name: other[name] if value == "other" else value for name, value in divergence.odd.items()}
            values = Values(f"U1R{world}", settings=divergence.settings, debug=debug)
            quiet = divergence.quiet and not debug
            return RankFault(divergence.program, values, world, odd, differs=differs, named=not quiet, quiet=quiet)
        name = draw.choice(list(PHASES))
        phase, act = PHASES[name], "raise" if name in HARMLESS else draw.choice(ACTS)
        strategy = f"U1R{world}" if phase.program == "attention" else str(draw.choice(Strategy.all_for(world)))
        odd = 0 if name == "report: writing" else draw.randrange(world)
        values, nth = Values(strategy, **phase.values), draw.randint(1, phase.calls)
        return RankFault(phase.program, values, world, odd, act, phase.target, nth, harmless=name in HARMLESS)

    def outcome(self, case: RankFault) -> Outcome:
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dbsp-faults.") as folder:
            ends = run_ranks(case, Path(folder))
        seconds = round(time.monotonic() - start, 1)
        return Outcome(failure_of(case, ends), {"seconds until all had ended": seconds})


def run_ranks(case: RankFault, folder: Path) -> list[RankEnd | None]:
    """Runs a case. Returns the end of each rank, None if it hangs; a rank that was killed has no error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ranks = [context.Process(target=be_a_rank, args=(rank, case, folder)) for rank in range(case.world)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    ends: list[RankEnd | None] = []
    for rank, process in enumerate(ranks):
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            process.kill()
            ends.append(None)
            continue
        end = folder / f"end{rank}"
        killed = RankEnd(f"exit code {process.exitcode}", fired=(folder / "fired").exists())
        ends.append(RankEnd(**json.loads(end.read_text(encoding="utf-8"))) if end.exists() else killed)
    return ends


def be_a_rank(rank: int, case: RankFault, folder: Path) -> None:
    """Runs the program of a case, and leaves its end in a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.chdir(folder)
    if rank == case.odd and case.act:
        inject(case.act, case.target, case.nth, folder / "fired")
    values = replace(case.values, **case.differs) if rank == case.odd else case.values
    difference, error = 0.0, None
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_S), case.world, rank)
        difference = programs.PROGRAMS[case.program](values)
    except Exception as raised:
        error = in_one_line(raised)
    end = RankEnd(error, difference, programs.calls_done, (folder / "fired").exists())
    (folder / f"end{rank}").write_text(json.dumps(vars(end)), encoding="utf-8")
    if error is None:
        dist.destroy_process_group()  # a rank that fails ends at once, and its connections with it
    os._exit(0)


def inject(act: str, target: str, nth: int, sign: Path) -> None:
    """Makes the nth call of a function, from now on, fail. sign: a file that says that it has happened"""
    owner, _, name = target.rpartition(".")
    holder = pkgutil.resolve_name(owner)
    attribute = vars(holder)[name]
    function, calls = getattr(holder, name), 0

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += not programs.in_reference()
        if calls == nth and not programs.in_reference():
            sign.touch()
            if act == "raise":
                raise RuntimeError("injected: a fault")
            if act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(SLOW_S)
        return function(*args, **options)

    setattr(holder, name, staticmethod(wrapped) if isinstance(attribute, (staticmethod, classmethod)) else wrapped)


def failure_of(case: RankFault, ends: Sequence[RankEnd | None]) -> str | None:
    """Returns what is wrong with the ends of a case's ranks, or None."""
    happened = not case.act or any(end is not None and end.fired for end in ends)
    must_succeed = not happened or case.act == "slow" or case.harmless
    for rank, end in enumerate(ends):
        if end is None:
            return f"rank {rank} hangs"
        if case.quiet:
            continue
        if must_succeed:
            if end.error is not None or not end.difference <= TOLERANCE:
                return f"rank {rank} ends with {end.error}, wrong by {end.difference:.3g}"
            continue
        wrong = _failure_of_rank(case, rank, end)
        if wrong is not None:
            return wrong
    return None


def _failure_of_rank(case: RankFault, rank: int, end: RankEnd) -> str | None:
    """Judges a rank that must end with an error."""
    if end.error is None:
        return f"rank {rank} does not fail"
    if case.act == "kill" and rank == case.odd:
        return None if end.error == f"exit code {-signal.SIGKILL}" else f"rank {rank} was not killed: {end.error}"
    if case.named:
        named = f"rank(s) [{case.odd}]" in end.error
        if not named or end.calls:
            return (
                f"rank {rank} says {end.error!r} after {end.calls} calls, and should name rank {case.odd} before any"
            )
        return None
    if case.act == "raise" and rank == case.odd:
        return None if "injected" in end.error else f"rank {rank} does not say what was raised in it: {end.error}"
    clear = any(words in end.error for words in CLEAR) or (case.differs and SIZES_DIFFER in end.error)
    return None if clear else f"rank {rank} says {end.error!r}"
