"""Denoising steps by the thousand in one process group, and pipelines by the hundred in another: nothing may grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from scripts.checks.stress.frame import Outcome, Part
from scripts.checks.stress.soak.census import IN_USE, RESIDENT, counts_that_grow, slope
from scripts.checks.stress.soak.soak_draw import STEPS, Block, Cycle, draw_block, draw_cycle
from scripts.checks.stress.soak.soak_worker import Measured, run_block, run_cycle
from tests.support.workers import WorkerError, WorkerPool

ENOUGH = 400
"""Cases of a kind after which growth is known well enough: 10,000 steps, 400 pipelines. Sizes are ever new, so that it
takes some 200 until caches of bounded size are full and freed memory is used again."""
PIPELINES_MB = {IN_USE: 0.1, RESIDENT: 0.25}
"""That memory may grow by in 20 pipelines. Resident memory, of a heap whose holes fill late, is less precise."""
WORLD = 2
BOUND = 1e-5
PATIENCE_S = 120.0
PRELOADED = ("tests.support.interpreter", "scripts.checks.stress.soak.soak_worker")


class Soak(Part):
    """Even cases are blocks of steps, odd ones pipelines. Stress tests that go on have new processes, whose warm-up
    begins; the most that any has grown by stays."""

    name = "soak"

    def __init__(self) -> None:
        self._tracks = (
            Track(run_block, "100 steps", 100 / STEPS, ENOUGH),
            Track(run_cycle, "20 pipelines", 20, ENOUGH, PIPELINES_MB),
        )

    def draw(self, seed: int, number: int) -> Block | Cycle:
        return draw_cycle(seed, number // 2) if number % 2 else draw_block(seed, number // 2)

    def judged(self, cases: Mapping[int, Block | Cycle]) -> Iterator[Outcome]:
        for number, case in cases.items():
            yield self._tracks[number % 2].take(number, case)

    def repeat(self, seed: int, number: int) -> Outcome:
        """Runs one case so often that what leaks in it is found."""
        try:
            for _ in range(ENOUGH):
                outcome = self._alone(self.draw(seed, number), number)
                if outcome.failure:
                    break
            return outcome
        finally:
            self.close()

    def close(self) -> None:
        for track in self._tracks:
            track.close()


@dataclass
class Track:
    """A process group and its series of measurements, by rank. The first half of a series is its warm-up.

    run:    one case, on the workers
    span:   what memory may grow by `most` in, in words;  cases: the same, counted
    enough: cases after which growth is judged: caches of all setups fill up before
    most:   MB, by name of the census
    """

    run: Callable[..., Measured]
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
            found: list[Measured] = self.pool.run(self.run, case, leak)
        except (WorkerError, EOFError, OSError) as error:
            self.close()
            return Outcome(number, f"{type(error).__name__} {' '.join(str(error).split())}")
        for series, one in zip(self.series, found, strict=True):
            series.append(dict(one.census))
        measure = {"error": max(one.error for one in found), **self._measure()}
        wrong = self._wrong(found)
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
        """Returns the most there was, and once it is known well enough, what memory grows by."""
        growth = {f"{name} more in {self.span}": more for name, more in self.growth.items()} if self._judged else {}
        return growth | {name: max(series[-1][name] for series in self.series) for name in self.series[0][-1]}

    def _wrong(self, found: list[Measured]) -> list[str]:
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
        if len({one.result for one in found}) > 1:
            wrong.append("the ranks' outputs differ")
        if not max(one.error for one in found) <= BOUND:
            wrong.append(f"wrong by {max(one.error for one in found):.3g}")
        return wrong
