"""Random attentions on 1 to 8 ranks, compared with dense masked attention in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scripts.checks.stress.frame import Outcome
from scripts.checks.stress.oracle.attention_case import CASES_PER_WORLD, Draw, draw_case
from scripts.checks.stress.oracle.oracle_worker import Answer, run_cases
from scripts.checks.stress.oracle.shrinking import variants
from tests.support.workers import WorkerError, WorkerPool

BOUNDS = {
    ("float32", "output"): 1e-5,
    ("float32", "gradients"): 1e-5,
    ("float64", "output"): 1e-12,
    ("float64", "gradients"): 1e-12,
    ("bfloat16", "output"): 2e-2,
    ("bfloat16", "gradients"): 4e-2,
}
"""Of the largest error, as a share of the largest number expected where that is above 1."""
TOGETHER = 10
"""Cases that are sent to the workers at once."""
PATIENCE_S = 180.0
MOST_TRIES = 80
"""Of smaller variants of a failing case."""
PRELOADED = (
    "tests.support.interpreter",
    "scripts.checks.stress.oracle.oracle_worker",
    "torch.fx.experimental.symbolic_shapes",
)


class Oracle:
    name = "oracle"

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def run(self, seed: int, first: int) -> Iterator[Outcome]:
        try:
            while True:
                last = min(first + TOGETHER, (first // CASES_PER_WORLD + 1) * CASES_PER_WORLD)
                yield from self._some(seed, list(range(first, last)))
                first = last
        finally:
            self._close()

    def repeat(self, seed: int, number: int) -> Outcome:
        try:
            return next(self._some(seed, [number]))
        finally:
            self._close()

    def explain(self, seed: int, number: int) -> str:
        """The smallest case that still fails, found by trying smaller variants of it one after another."""
        try:
            return repr(self._smallest(draw_case(seed, number)))
        finally:
            self._close()

    def _smallest(self, case: Draw) -> Draw:
        tries = 0
        if not (failure := self._failure_of(case)) or "Hang" in failure:
            return case
        while tries < MOST_TRIES:
            for smaller in variants(case):
                tries += 1
                if self._failure_of(smaller):
                    case = smaller
                    break
            else:
                break
        return case

    def _failure_of(self, case: Draw) -> str | None:
        return self._judged(0, case, self._ask([case])).failure

    def _some(self, seed: int, numbers: list[int]) -> Iterator[Outcome]:
        while numbers:
            cases = [draw_case(seed, number) for number in numbers]
            answers = self._ask(cases)
            if isinstance(answers, str) and len(numbers) > 1:
                for number in numbers:  # which of them it was
                    yield from self._some(seed, [number])
                return
            told = 1 if isinstance(answers, str) else len(answers)
            for place in range(told):
                one = answers if isinstance(answers, str) else [answers[place]]
                yield self._judged(numbers[place], cases[place], one)
            numbers = numbers[told:]

    def _ask(self, cases: Sequence[Draw]) -> str | list[list[Answer]]:
        """By case and rank; or what became of the workers."""
        world = cases[0].world
        if self._pool is None or self._pool.world != world:
            self._close()
            self._pool = WorkerPool(world, PRELOADED, PATIENCE_S)
        try:
            by_rank = self._pool.run(run_cases, cases)
        except (WorkerError, EOFError, OSError) as error:
            self._close()
            return f"{type(error).__name__} {' '.join(str(error).split())}"
        answered = min(map(len, by_rank))
        if any(answer.failure for answers in by_rank for answer in answers):
            self._close()  # they may be out of step
        return [[answers[place] for answers in by_rank] for place in range(answered)]

    @staticmethod
    def _judged(number: int, case: Draw, answers: str | list[list[Answer]]) -> Outcome:
        if isinstance(answers, str):
            return Outcome(number, answers)
        raised = [f"rank {rank}: {answer.failure}" for rank, answer in enumerate(answers[0]) if answer.failure]
        if raised:
            return Outcome(number, raised[0])
        errors = {kind: max(answer.errors[kind] for answer in answers[0]) for kind in answers[0][0].errors}
        wrong = [f"{kind} wrong by {e:.3g}" for kind, e in errors.items() if not e <= BOUNDS[case.dtype, kind]]
        measure = {f"{case.dtype} {kind}": error for kind, error in errors.items()}
        return Outcome(number, "; ".join(wrong) or None, measure)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
