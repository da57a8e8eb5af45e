"""Generations by the hundred in one process group: nothing may grow, and all must be exact."""

from __future__ import annotations

from collections.abc import Mapping

from scripts.checks.stress.frame import Failed, Outcome, Part, Workers
from scripts.checks.stress.soak.census import IN_USE, RESIDENT, counts_that_grow, slope
from scripts.checks.stress.soak.generations import Generation, Measured, draw_generation, generate

ENOUGH = 400
"""Cases after which growth is known well enough. Sizes are ever new, so that it takes some 200 until caches of bounded
size are full and freed memory is used again."""
SPAN = 20
MOST_MB = {IN_USE: 0.1, RESIDENT: 0.25}
"""That memory may grow by in `SPAN` cases. Resident memory, of a heap whose holes fill late, is less precise."""
WORLD = 2
BOUND = 1e-5
PATIENCE_S = 120.0
PRELOADED = ("tests.support.interpreter", "scripts.checks.stress.soak.generations")


class Soak(Part):
    """Generations in one process group until one fails: the next is the first of a new group, whose warm-up begins.

    series: by rank, a census after each case; the first half is the warm-up
    enough: cases after which growth is judged;  leak: whether one is planted in each case
    """

    name = "soak"
    draw = staticmethod(draw_generation)

    def __init__(self, enough: int = ENOUGH, leak: bool = False) -> None:
        self.series: list[list[Mapping[str, float]]] = [[] for _ in range(WORLD)]
        self._enough, self._leak = enough, leak
        self._workers = Workers(PRELOADED, PATIENCE_S)

    def repeat(self, seed: int, number: int) -> Outcome:
        """Runs one case so often that what leaks in it is found."""
        try:
            for _ in range(self._enough):
                outcome = self.outcome(number, self.draw(seed, number))
                if outcome.failure:
                    break
            return outcome
        finally:
            self.close()

    def close(self) -> None:
        self._workers.close()
        self.series = [[] for _ in range(WORLD)]

    def outcome(self, number: int, case: Generation) -> Outcome:
        """Runs a case, and judges it and what has grown so far."""
        try:
            found: list[Measured] = self._workers.ask(WORLD, generate, case, self._leak)
        except Failed as error:
            self.close()
            return Outcome(number, str(error))
        for series, one in zip(self.series, found, strict=True):
            series.append(one.census)
        error = max(one.error for one in found)
        measure = {"error": error} | {name: max(one.census[name] for one in found) for name in found[0].census}
        wrong = ["the ranks' outputs differ"] if len({one.result for one in found}) > 1 else []
        wrong += [f"wrong by {error:.3g}"] if not error <= BOUND else []
        if len(self.series[0]) >= self._enough:
            growth = {name: max(slope(series, name) for series in self.series) * SPAN for name in MOST_MB}
            measure |= {f"{name} more in {SPAN}": more for name, more in growth.items()}
            wrong += [f"rank {rank}: {one}" for rank, all_ in enumerate(self.series) for one in counts_that_grow(all_)]
            wrong += [
                f"memory grows by {more:.3f} {name} in {SPAN} cases"
                for name, more in growth.items()
                if more > MOST_MB[name]
            ]
        if wrong:
            self.close()
        return Outcome(number, "; ".join(wrong) or None, measure)
