"""Cases of one kind, one after another in one process group, and what was measured after each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scripts.checks.stress.frame import Outcome
from scripts.checks.stress.soak.census import IN_USE, RESIDENT
from scripts.checks.stress.soak.growth import counts_that_grow, slope
from scripts.checks.stress.soak.soak_draw import Block, Cycle
from scripts.checks.stress.soak.soak_worker import Told
from tests.support.workers import WorkerError, WorkerPool

WORLD = 2
BOUND = 1e-5
PATIENCE_S = 120.0
PRELOADED = ("tests.support.interpreter", "scripts.checks.stress.soak.soak_worker")


@dataclass
class Track:
    """A process group and its series of measurements, by rank. The first half of a series is its warm-up.

    run:    one case, on the workers
    span:   what memory may grow by `most` in, in words;  cases: the same, counted
    enough: cases after which growth is judged: caches fill up before, each stand's in its turn
    most:   MB, by name of the census
    """

    run: Callable[..., Told]
    span: str
    cases: float
    enough: int
    most: Mapping[str, float] = field(default_factory=lambda: {RESIDENT: 0.1, IN_USE: 0.1})
    series: list[list[dict[str, float]]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    pool: WorkerPool | None = None

    def take(self, number: int, case: Block | Cycle, leak: bool = False) -> Outcome:
        """Runs a case. After a failure the next one is the first of a new process group, whose warm-up begins.

        leak: planted, see `run_block`
        """
        self.pool = self.pool or WorkerPool(WORLD, PRELOADED, PATIENCE_S)
        try:
            told: list[Told] = self.pool.run(self.run, case, leak)
        except (WorkerError, EOFError, OSError) as error:
            self.close()
            return Outcome(number, f"{type(error).__name__} {' '.join(str(error).split())}")
        for series, one in zip(self.series, told, strict=True):
            series.append(dict(one.census))
        measure = {"error": max(one.error for one in told), **self._measure()}
        wrong = self._wrong(told)
        if wrong:
            self.close()
        return Outcome(number, "; ".join(wrong) or None, measure)

    @property
    def growth(self) -> dict[str, float]:
        """MB in a span, of the rank that grows most, by name of the census."""
        return {name: max(slope(series, name) for series in self.series) * self.cases for name in self.most}

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        self.series = [[] for _ in range(WORLD)]

    @property
    def _judged(self) -> bool:
        return len(self.series[0]) >= self.enough

    def _measure(self) -> dict[str, float]:
        """The most there was, and once it is known well enough, what memory grows by."""
        growth = {f"{name} more in {self.span}": more for name, more in self.growth.items()} if self._judged else {}
        return growth | {name: max(series[-1][name] for series in self.series) for name in self.series[0][-1]}

    def _wrong(self, told: list[Told]) -> list[str]:
        wrong = []
        if self._judged:
            wrong = [
                f"rank {rank}: {one}" for rank, series in enumerate(self.series) for one in counts_that_grow(series)
            ]
            wrong += [
                f"memory grows by {more:.3f} {name} in {self.span}"
                for name, more in self.growth.items()
                if more > self.most[name]
            ]
        if len({one.result for one in told}) > 1:
            wrong.append("the ranks' outputs differ")
        if not max(one.error for one in told) <= BOUND:
            wrong.append(f"wrong by {max(one.error for one in told):.3g}")
        return wrong
