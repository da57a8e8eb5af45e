"""Denoising steps by the thousand in one process group, and pipelines by the hundred in another: nothing may grow."""

from __future__ import annotations

from collections.abc import Iterator

from scripts.checks.stress.frame import Outcome
from scripts.checks.stress.soak.census import IN_USE, RESIDENT
from scripts.checks.stress.soak.soak_draw import STEPS, Block, Cycle, draw_block, draw_cycle
from scripts.checks.stress.soak.soak_worker import run_block, run_cycle
from scripts.checks.stress.soak.track import Track

ENOUGH = 400
"""Cases of a kind after which growth is known well enough: 10,000 steps, 400 pipelines. Sizes are ever new, so that it
takes some 200 until caches of bounded size are full and freed memory has found its place."""
PIPELINES_MB = {IN_USE: 0.1, RESIDENT: 0.25}
"""That memory may grow by in 20 pipelines. Resident memory, of a heap whose holes fill late, tells less finely."""
TIMES = ENOUGH
"""That a case is repeated by itself: what leaks in it does so again."""


class Soak:
    """Even cases are blocks of steps, odd ones pipelines. A campaign that goes on has new processes, whose warm-up
    begins; the most that any has grown by stays."""

    name = "soak"

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        steps, pipelines = _tracks()
        try:
            while True:
                yield (pipelines if first % 2 else steps).take(first, _case(seed, first))
                first += 1
        finally:
            steps.close()
            pipelines.close()

    def repeat(self, seed: int, number: int) -> Outcome:
        track = _tracks()[number % 2]
        try:
            for _ in range(TIMES):
                outcome = track.take(number, _case(seed, number))
                if outcome.failure:
                    break
            return outcome
        finally:
            track.close()

    def explain(self, seed: int, number: int) -> str:
        """The latest case; growth is that of all before it."""
        return repr(_case(seed, number))


def _tracks() -> tuple[Track, Track]:
    return (
        Track(run_block, "100 steps", 100 / STEPS, ENOUGH),
        Track(run_cycle, "20 pipelines", 20, ENOUGH, PIPELINES_MB),
    )


def _case(seed: int, number: int) -> Block | Cycle:
    return draw_cycle(seed, number // 2) if number % 2 else draw_block(seed, number // 2)
