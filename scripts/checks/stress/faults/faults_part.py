"""Faults in every phase: all processes end, with one clear error, and nothing is left behind."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.checks.stress.faults.generating import GENERATIONS
from scripts.checks.stress.faults.keeper import LATE, Fault, start_keeper, wait_for
from scripts.checks.stress.faults.phases import DIVERGENCES, PHASES, WRITERS
from scripts.checks.stress.faults.rank_fault import divergence, fault
from scripts.checks.stress.frame import WORLDS, Outcome, Part

PRELOADED = (
    "tests.support.interpreter",  # before anything else imports triton
    "torch._dynamo",
    "diffusers.models.transformers.transformer_wan",
    "dbsp_cli.cli",
    "dbsp_cli.generate.videos",
    "scripts.checks.stress.faults.programs",
    "tests.support.models.tiny_transformers",
)
"""What every process has from its birth."""
EVERYWHERE = ("kill", "stop", "raise", "out of memory", "slow")
SOMEWHERE = {
    "interrupt": ("mask exchange: bits", "planning", "dispatch", "kernel: 2nd chunk", "combine", "backward: kernel"),
    "terminate": ("mask exchange: bits", "kernel: 2nd chunk", "combine", "report: gathering"),
    "out of CPU memory": ("planning", "planning: a new plan", "report: gathering", "attaching: session"),
    "disk full": WRITERS,
    "read-only": WRITERS,
}
"""Phases that further acts happen in."""
FROM_GRID = 0.5
"""Share of cases."""
DIVERGE = 0.25
"""Share of the others, on ranks of any number."""


@functools.cache
def grid() -> tuple[Fault, ...]:
    """Returns every act in every phase, every divergence with and without debug, and all of `dbsp generate`."""
    cases: list[Fault] = [fault(name, act, world=3) for act in EVERYWHERE for name in PHASES]
    cases += [fault(name, act, world=2) for act, names in SOMEWHERE.items() for name in names]
    cases += [divergence(one, debug) for one in DIVERGENCES for debug in (True, False)]
    return (*cases, *GENERATIONS)


class Faults(Part):
    """Faults of processes that are forked, three cases at once: most of their time they wait."""

    name = "faults"
    together = 3

    def draw(self, seed: int, number: int) -> Fault:
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

    def judged(self, cases: Sequence[Fault]) -> Iterator[Outcome]:
        """Yields outcomes; a case that is late runs once more alone: it may only have been short of a core."""
        with tempfile.TemporaryDirectory(prefix="dbsp-faults.") as work:
            folders = [Path(work, str(number)) for number in range(len(cases))]
            keepers = [start_keeper(case, folder, PRELOADED) for case, folder in zip(cases, folders, strict=True)]
            found = [wait_for(keeper, folder) for keeper, folder in zip(keepers, folders, strict=True)]
        for case, (failure, seconds) in zip(cases, found, strict=True):
            late = failure is not None and LATE in failure and len(cases) > 1
            yield self._alone(case) if late else Outcome(failure, {"seconds until all had ended": seconds})
