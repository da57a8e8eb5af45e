"""Random attentions on 1 to 8 ranks, compared with dense masked attention in one process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy
from dbsp_core.sources import LocalQK
from scripts.checks.stress.frame import Failed, Outcome, Part, Workers
from scripts.checks.stress.oracle.attention_case import CASES_PER_WORLD, Draw, draw_case, variants
from scripts.checks.stress.oracle.drawn_masks import mask_of, sources_of
from tests.support.attention_cases import as_sent, at_padding, attend, shards
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, largest_difference

BOUNDS = {
    (torch.float32, "output"): 1e-5,
    (torch.float32, "gradients"): 1e-5,
    (torch.float64, "output"): 1e-12,
    (torch.float64, "gradients"): 1e-12,
    (torch.bfloat16, "output"): 2e-2,
    (torch.bfloat16, "gradients"): 4e-2,
}
PATIENCE_S = 180.0
PRELOADED = (
    "tests.support.interpreter",
    "scripts.checks.stress.oracle.oracle_part",
    "torch.fx.experimental.symbolic_shapes",
)
Answer = dict[str, float] | str
"""One rank's errors by "output" and "gradients", or what it raised."""


class Oracle(Part):
    """Attentions on pools of processes."""

    name = "oracle"
    together = CASES_PER_WORLD // 2
    most_tries = 80
    draw = staticmethod(draw_case)
    smaller = staticmethod(variants)

    def __init__(self) -> None:
        self._workers = Workers(PRELOADED, PATIENCE_S)

    def judged(self, cases: Mapping[int, Draw]) -> Iterator[Outcome]:
        """Yields outcomes; after a case that raises, the rest begins again in new processes."""
        left = dict(cases)
        while left:
            try:
                by_rank = self._workers.ask(next(iter(left.values())).world, run_cases, list(left.values()))
            except Failed as error:
                for number, case in left.items():  # which of them it was
                    yield from [Outcome(number, str(error))] if len(left) == 1 else self.judged({number: case})
                return
            if any(isinstance(answers[-1], str) for answers in by_rank):
                self.close()  # they may be out of step
            for (number, case), *answers in list(zip(left.items(), *by_rank, strict=False)):
                yield _outcome(number, case, answers)
                del left[number]

    def close(self) -> None:
        self._workers.close()


def _outcome(number: int, case: Draw, answers: Sequence[Answer]) -> Outcome:
    raised = [f"rank {rank}: {answer}" for rank, answer in enumerate(answers) if isinstance(answer, str)]
    if raised:
        return Outcome(number, raised[0])
    errors = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
    wrong = [f"{kind} wrong by {e:.3g}" for kind, e in errors.items() if not e <= BOUNDS[case.dtype, kind]]
    measure = {f"{str(case.dtype)[6:]} {kind}": error for kind, error in errors.items()}
    return Outcome(number, "; ".join(wrong) or None, measure)


def run_cases(rank: int, world: int, cases: Sequence[Draw], scale: float = 1.0) -> list[Answer]:
    """Runs cases up to the first that raises: ranks may be out of step then. scale: 1, but for a negative control"""
    answers: list[Answer] = []
    for case in cases:
        try:
            answers.append(_errors(rank, case, scale))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answers.append(f"{text} ({where.filename.rpartition('/')[2]}:{where.lineno})")
            break
    return answers


def _errors(rank: int, case: Draw, scale: float) -> dict[str, float]:
    sources = sources_of(case)
    tokens = sum(one.tokens for one in case.sequences)
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.heads, tokens, case.head_dim)
    *full, weights = [torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype) for _ in range(4)]
    # 1. The layout, and this rank's tokens in it.
    layout = _layout_of(case, sources)
    local, mine, positions = shards(full, layout, rank, case.padded)
    # 2. The mask: a predicted one is that of a single process.
    tokens_here = LocalQK(local[0], local[1], layout, SequenceGroup.from_group(), case.head_dim**-0.5)
    mask = mask_of(case, sources, tokens_here)
    if case.predicted and rank == 0:
        alone = mask_of(case, sources, LocalQK.alone(full[0], full[1], case.head_dim**-0.5))
        assert torch.equal(alone.bits, mask.bits), "the predicted mask is not that of a single process"
    if mask.heads != case.heads:
        local, full = ([t.flatten(0, 1).unsqueeze(0) for t in tensors] for tensors in (local, full))
        weights = weights.flatten(0, 1).unsqueeze(0)
    # 3. The attention, distributed and not.
    local = [t.requires_grad_(case.backward) for t in local]
    with interpreted() if case.kernel == "triton" else contextlib.nullcontext():
        out = attend(case, mask, layout, local, scale)
        if case.backward:
            (out[:, :, positions] * weights[:, :, mine]).sum().backward()
    leaves = [t.double().requires_grad_(case.backward) for t in as_sent(case, full)]
    asked = torch.arange(tokens) if case.backward else mine
    expected = _expected(mask, leaves, asked)
    errors = {"output": _error(out[:, :, positions], expected[:, :, mine] if case.backward else expected)}
    assert out.dtype == case.dtype, "the output has another dtype than q"
    assert not at_padding(out, positions).any(), "padding must come back as zeros"
    if case.backward:
        (expected * weights).sum().backward()
        found = [(here.grad, leaf.grad) for here, leaf in zip(local, leaves, strict=True)]
        at_none = [at_padding(here, positions) for here, _ in found if here is not None]
        assert not any(here.any() for here in at_none), "padding has a gradient"
        errors["gradients"] = max(_error(here[:, :, positions], leaf[:, :, mine]) for here, leaf in found)
    return errors


def _layout_of(case: Draw, sources: Sequence[tuple[BlockGrid, object]]) -> SequenceLayout:
    grid = BlockGrid.packed([grid for grid, _ in sources])
    if case.layout == "shuffled":
        order = np.random.default_rng(case.seed).permutation(grid.tokens)
        return SequenceLayout.from_streams([order], case.world)
    return SequenceLayout.named(case.layout, grid, Strategy.parse(case.strategy), streams=case.streams)


def _expected(mask: BlockMask, tensors: list[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
    """Returns the attention of these tokens, in their order: each sequence by itself, dense with its own mask."""
    found, positions, first = [], [], 0
    for part in mask.parts:
        q, k, v = (t[:, :, first : first + part.grid.tokens] for t in tensors)
        (here,) = torch.nonzero((queries >= first) & (queries < first + part.grid.tokens), as_tuple=True)
        own = queries[here] - first
        found.append(dense_attention(q[:, :, own], k, v, part, queries=own))
        positions.append(here)
        first += part.grid.tokens
    return torch.cat(found, dim=2)[:, :, torch.cat(positions).argsort()]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error, as a share of the largest number expected where that is above 1."""
    return largest_difference(found.double(), expected) / max(1.0, largest_difference(expected, torch.zeros(())))
