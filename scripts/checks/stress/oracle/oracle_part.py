"""Random attentions on 1 to 8 ranks, compared with dense masked attention in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from scripts.checks.stress.frame import Failed, Outcome, Part, Workers
from scripts.checks.stress.oracle.attention_case import CASES_PER_WORLD, Draw, draw_case, variants
from scripts.checks.stress.oracle.oracle_worker import Answer, run_cases

BOUNDS = {
    (torch.float32, "output"): 1e-5,
    (torch.float32, "gradients"): 1e-5,
    (torch.float64, "output"): 1e-12,
    (torch.float64, "gradients"): 1e-12,
    (torch.bfloat16, "output"): 2e-2,
    (torch.bfloat16, "gradients"): 4e-2,
}
"""Of the largest error, as a share of the largest number expected where that is above 1."""
PATIENCE_S = 180.0
PRELOADED = (
    "tests.support.interpreter",
    "scripts.checks.stress.oracle.oracle_worker",
    "torch.fx.experimental.symbolic_shapes",
)


class Oracle(Part):
    """Attentions on pools of processes."""

    name = "oracle"
    together = CASES_PER_WORLD // 2
    most_tries = 80

    def __init__(self) -> None:
        self._workers = Workers(PRELOADED, PATIENCE_S)

    def draw(self, seed: int, number: int) -> Draw:
        return draw_case(seed, number)

    def smaller(self, case: Draw) -> Iterator[Draw]:
        return variants(case)

    def judged(self, cases: Mapping[int, Draw]) -> Iterator[Outcome]:
        """Yields outcomes; after a case that raises, the rest begins again in new processes."""
        left = dict(cases)
        while left:
            answers = self._ask(list(left.values()))
            if isinstance(answers, str) and len(left) > 1:
                for number, case in left.items():  # which of them it was
                    yield from self.judged({number: case})
                return
            answered = [answers] if isinstance(answers, str) else answers
            for (number, case), answer in list(zip(left.items(), answered, strict=False)):
                yield _outcome(number, case, answer)
                del left[number]

    def close(self) -> None:
        self._workers.close()

    def _ask(self, cases: list[Draw]) -> str | list[list[Answer]]:
        """Returns answers by case and rank, up to the first case that raised; or what became of the workers."""
        try:
            by_rank = self._workers.ask(cases[0].world, run_cases, cases)
        except Failed as error:
            return str(error)
        if any(answer.failure for answers in by_rank for answer in answers):
            self.close()  # they may be out of step
        return [list(answers) for answers in zip(*by_rank, strict=False)]


def _outcome(number: int, case: Draw, answers: str | list[Answer]) -> Outcome:
    if isinstance(answers, str):
        return Outcome(number, answers)
    raised = [f"rank {rank}: {answer.failure}" for rank, answer in enumerate(answers) if answer.failure]
    if raised:
        return Outcome(number, raised[0])
    errors = {kind: max(answer.errors[kind] for answer in answers) for kind in answers[0].errors}
    wrong = [f"{kind} wrong by {e:.3g}" for kind, e in errors.items() if not e <= BOUNDS[case.dtype, kind]]
    measure = {f"{str(case.dtype)[6:]} {kind}": error for kind, error in errors.items()}
    return Outcome(number, "; ".join(wrong) or None, measure)
