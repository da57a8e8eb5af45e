"""Random attentions on 1 to 8 ranks, compared with dense masked attention in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy
from dbsp_core.sources import LocalQK
from scripts.checks.stress.cases import Draw, draw_case, mask_of, sources_of
from scripts.checks.stress.part import Outcome, Part, in_one_line
from tests.support.attention_cases import as_sent, at_padding, attend, shards
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, largest_difference
from tests.support.workers import WorkerError, WorkerPool

BOUNDS = {
    (torch.float32, "output"): 1e-5,
    (torch.float32, "gradients"): 1e-5,
    (torch.float64, "output"): 1e-12,
    (torch.float64, "gradients"): 1e-12,
    (torch.bfloat16, "output"): 2e-2,
    (torch.bfloat16, "gradients"): 4e-2,
}
PRELOADED = (
    "tests.support.interpreter",
    "scripts.checks.stress.oracle",
    "torch.fx.experimental.symbolic_shapes",
)
PATIENCE_S = 180.0  # after which ranks that have not answered hang


class Oracle(Part):
    """Attentions on pools of processes, one pool at a time."""

    def __init__(self) -> None:
        self._pool: WorkerPool | None = None

    def draw(self, seed: int, number: int) -> Draw:
        return draw_case(seed, number)

    def outcome(self, case: Draw) -> Outcome:
        """Judges a case by its largest error on all ranks."""
        if self._pool is None or self._pool.world != case.world:
            self.close()
            self._pool = WorkerPool(case.world, PRELOADED, PATIENCE_S)
        try:
            by_rank = self._pool.run(errors_of, case)
        except (WorkerError, EOFError, OSError) as error:
            self.close()
            return Outcome(in_one_line(error))
        errors = {kind: max(rank_errors[kind] for rank_errors in by_rank) for kind in by_rank[0]}
        wrong = [f"{kind} wrong by {e:.3g}" for kind, e in errors.items() if not e <= BOUNDS[case.dtype, kind]]
        return Outcome("; ".join(wrong) or None, {f"{str(case.dtype)[6:]} {kind}": e for kind, e in errors.items()})

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def errors_of(rank: int, world: int, case: Draw, scale: float = 1.0) -> dict[str, float]:
    """Returns this rank's errors by "output" and "gradients". scale: 1, but for a negative control"""
    sources = sources_of(case)
    tokens = sum(sequence.tokens for sequence in case.sequences)
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
        gradients = [(shard.grad, leaf.grad) for shard, leaf in zip(local, leaves, strict=True)]
        of_padding = [at_padding(shard, positions) for shard, _ in gradients if shard is not None]
        assert not any(gradient.any() for gradient in of_padding), "padding has a gradient"
        errors["gradients"] = max(_error(shard[:, :, positions], leaf[:, :, mine]) for shard, leaf in gradients)
    return errors


def _layout_of(case: Draw, sources: Sequence[tuple[BlockGrid, object]]) -> SequenceLayout:
    grid = BlockGrid.packed([grid for grid, _ in sources])
    if case.layout == "shuffled":
        order = np.random.default_rng(case.seed).permutation(grid.tokens)
        return SequenceLayout.from_streams([order], case.world)
    return SequenceLayout.named(case.layout, grid, Strategy.parse(case.strategy), streams=case.streams)


def _expected(mask: BlockMask, tensors: list[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
    """Returns the attention of these tokens, in their order: each sequence by itself, dense with its own mask."""
    outputs, positions, first = [], [], 0
    for part in mask.parts:
        q, k, v = (t[:, :, first : first + part.grid.tokens] for t in tensors)
        (asked,) = torch.nonzero((queries >= first) & (queries < first + part.grid.tokens), as_tuple=True)
        rows = queries[asked] - first
        outputs.append(dense_attention(q[:, :, rows], k, v, part, queries=rows))
        positions.append(asked)
        first += part.grid.tokens
    return torch.cat(outputs, dim=2)[:, :, torch.cat(positions).argsort()]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error, as a share of the largest number expected where that is above 1."""
    return largest_difference(actual.double(), expected) / max(1.0, largest_difference(expected, torch.zeros(())))
