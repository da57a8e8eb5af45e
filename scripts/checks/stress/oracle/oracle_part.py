"""Random attentions on 1 to 8 ranks, compared with dense masked attention in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy
from dbsp_core.sources import LocalQK
from scripts.checks.stress.frame import Outcome, Part
from scripts.checks.stress.oracle.cases import Draw, draw_case, mask_of, sources_of, variants
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


class Oracle(Part):
    """Attentions on pools of processes."""

    name = "oracle"
    most_tries = 80
    preloaded = (
        "tests.support.interpreter",
        "scripts.checks.stress.oracle.oracle_part",
        "torch.fx.experimental.symbolic_shapes",
    )
    patience_s = 180.0
    draw = staticmethod(draw_case)
    smaller = staticmethod(variants)

    def outcome(self, case: Draw) -> Outcome:
        """Judges a case by its largest error on all ranks."""
        by_rank = self.ask(case.world, errors_of, case)
        errors = {kind: max(one[kind] for one in by_rank) for kind in by_rank[0]}
        wrong = [f"{kind} wrong by {e:.3g}" for kind, e in errors.items() if not e <= BOUNDS[case.dtype, kind]]
        return Outcome("; ".join(wrong) or None, {f"{str(case.dtype)[6:]} {kind}": e for kind, e in errors.items()})


def errors_of(rank: int, world: int, case: Draw, scale: float = 1.0) -> dict[str, float]:
    """Returns this rank's errors by "output" and "gradients". scale: 1, but for a negative control"""
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
