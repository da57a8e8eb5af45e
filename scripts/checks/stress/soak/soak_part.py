"""Generations by the hundred in one process group: nothing may grow, and all must be exact."""

from __future__ import annotations

import random
from collections.abc import Mapping

from scripts.checks.stress.frame import Outcome, Part
from scripts.checks.stress.soak.census import IN_USE, RESIDENT, count_process
from scripts.checks.stress.soak.generations import SETUPS, Generation, generate

ROUND = 80
"""Cases until they come again, in the same order."""
MOST_MORE = {IN_USE: 0.5, RESIDENT: 6.0, "entries": 4, "everything": 50}
"""More after a round than after the one before; of what is not here, none. Resident memory, of a heap whose holes fill
late, is less precise. The passes that a step clock distinguishes, four at most, depend on all that came before. Python
keeps eleven objects where a folder of its path has changed."""
WORLD = 2
BOUND = 1e-5


class Soak(Part):
    """Generations in one process group until one fails: the next is the first of a new group.

    The processes are counted after each round of cases. A round has the same cases as the one before, so that what
    there is more of has leaked, however much pipelines and caches keep of different cases.

    cases: of a round;  leak: whether one is planted in each case
    """

    name = "soak"
    preloaded = ("tests.support.interpreter", "scripts.checks.stress.soak.generations")
    patience_s = 120.0

    def __init__(self, cases: int = ROUND, leak: bool = False) -> None:
        self._cases, self._leak = cases, leak
        self._done = 0
        self._counted: list[Mapping[str, float]] = []  # by rank, after the last round

    def draw(self, seed: int, number: int) -> Generation:
        rng = random.Random(f"{seed}:{number % self._cases}")
        height, width = (16 * rng.randint(2, 4) for _ in range(2))
        return Generation(rng.randrange(len(SETUPS)), height, width, rng.randint(1, 4), rng.randrange(99))

    def repeat(self, seed: int, number: int) -> Outcome:
        """Runs one case so often that what leaks in it is found."""
        try:
            for _ in range(3 * self._cases):
                outcome = self._alone(self.draw(seed, number))
                if outcome.failure:
                    break
            return outcome
        finally:
            self.close()

    def close(self) -> None:
        super().close()
        self._done, self._counted = 0, []

    def outcome(self, case: Generation) -> Outcome:
        """Runs a case, and judges it, and at the end of a round what has grown."""
        results, errors = zip(*self.ask(WORLD, generate, case, self._leak), strict=True)
        self._done += 1
        growth = self._growth() if self._done % self._cases == 0 else []
        worst = max(errors)
        measure = {"error": worst} | {f"{name} more": max(one[name] for one in growth) for name in MOST_MORE if growth}
        wrong = ["the ranks' outputs differ"] if len(set(results)) > 1 else []
        wrong += [f"wrong by {worst:.3g}"] if not worst <= BOUND else []
        wrong += [
            f"rank {rank}: {more:g} {name} more than {self._cases} cases before"
            for rank, one in enumerate(growth)
            for name, more in one.items()
            if more > MOST_MORE.get(name, 0)
        ]
        if wrong:
            self.close()
        return Outcome("; ".join(wrong) or None, measure)

    def _growth(self) -> list[dict[str, float]]:
        """Counts each rank's process. Returns by rank what there is more of than after the last round.

        That is known from the third round on: pipelines are made in the first, and counting itself leaves something.
        """
        before, self._counted = self._counted, self.ask(WORLD, count_process)
        if self._done < 3 * self._cases:
            return []
        return [{name: now[name] - was[name] for name in now} for was, now in zip(before, self._counted, strict=True)]
