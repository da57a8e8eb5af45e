"""What the worker processes run: cases against dense attention in one process."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Plan,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
)
from dbsp_core.sources import LocalQK
from scripts.checks.stress.oracle.attention_case import Draw
from scripts.checks.stress.oracle.drawn_masks import mask_of, sources_of
from tests.support.attention_cases import random_owners
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, rounded_to_int8

RUBBISH = 1e4  # fills padding, which must not be seen


@dataclass(frozen=True)
class Answer:
    """One rank's. failure: what was raised;  errors: by "output" and "gradients", the largest, as a share of the
    largest number expected where that is above 1"""

    errors: dict[str, float]
    failure: str | None = None


def run_cases(rank: int, world: int, cases: Sequence[Draw], scale: float = 1.0) -> list[Answer]:
    """In order, up to the first that raises: ranks may be out of step then. scale: 1, but for a negative control"""
    answers = []
    for case in cases:
        try:
            answers.append(Answer(_run(rank, world, case, scale)))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {error}".split())
            answers.append(Answer({}, f"{text} ({where.filename.rpartition('/')[2]}:{where.lineno})"))
            break
    return answers


def _run(rank: int, world: int, case: Draw, scale: float) -> dict[str, float]:
    group, strategy = SequenceGroup.from_group(), Strategy.parse(case.strategy)
    sources, dtype = sources_of(case), getattr(torch, case.dtype)
    tokens = sum(one.tokens for one in case.sequences)
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.heads, tokens, case.width)
    full = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]
    # 1. The layout, and this rank's tokens in it.
    layout = _layout_of(case, sources, strategy)
    mine, places = (torch.from_numpy(a) for a in layout.tokens_at(rank))
    n_local = layout.shard if case.padded else int(places.max() if len(places) else -1) + 1
    local = [torch.full((*shape[:2], n_local, case.width), RUBBISH, dtype=dtype) for _ in range(3)]
    for here, everywhere in zip(local, full, strict=False):
        here[:, :, places] = everywhere[:, :, mine]
    # 2. The mask: a predicted one is that of a single process.
    mask = mask_of(case, sources, LocalQK(local[0], local[1], layout, group, case.width**-0.5))
    if case.predicted and rank == 0:
        alone = mask_of(case, sources, LocalQK.alone(full[0], full[1], case.width**-0.5))
        assert torch.equal(alone.bits, mask.bits), "the predicted mask is not that of a single process"
    if mask.heads != case.heads:
        local = [t.flatten(0, 1).unsqueeze(0) for t in local]
        full = [t.flatten(0, 1).unsqueeze(0) for t in full]
    # 3. The attention, distributed and not.
    local = [t.requires_grad_(case.backward) for t in local]
    with interpreted() if case.kernel == "triton" else contextlib.nullcontext():
        out = _attend(case, strategy, mask, layout, group, local, scale)
        if case.backward:
            (out[:, :, places] * full[3][:, :, mine]).sum().backward()
    sent = full[:3] if case.precision == "model" else rounded_to_int8(full[0], full[1], full[2])
    leaves = [t.double().requires_grad_(case.backward) for t in sent]
    asked = torch.arange(tokens) if case.backward else mine
    expected = _expected(mask, leaves, asked)
    errors = {"output": _error(out[:, :, places], expected[:, :, mine] if case.backward else expected)}
    padding = torch.ones(n_local, dtype=torch.bool)
    padding[places] = False
    assert out.dtype == dtype, "the output has another dtype than q"
    assert not out[:, :, padding].any(), "padding must come back as zeros"
    if case.backward:
        (expected * full[3]).sum().backward()
        found = [(here.grad, leaf.grad) for here, leaf in zip(local, leaves, strict=True)]
        assert not any(here[:, :, padding].any() for here, _ in found if here is not None), "padding has a gradient"
        errors["gradients"] = max(_error(here[:, :, places], leaf[:, :, mine]) for here, leaf in found)
    return errors


def _layout_of(case: Draw, sources: Sequence[tuple[BlockGrid, object]], strategy: Strategy) -> SequenceLayout:
    grid = BlockGrid.packed([grid for grid, _ in sources])
    if case.layout == "shuffled":
        order = np.random.default_rng(case.seed).permutation(grid.tokens)
        return SequenceLayout.from_streams([order], strategy.world)
    return SequenceLayout.named(case.layout, grid, strategy, streams=case.streams)


def _parts(bits: np.ndarray, grid: BlockGrid) -> list[BlockMask]:
    q, k = grid.q_axis.bounds, grid.k_axis.bounds
    return [
        BlockMask(bits[:, q[place] : q[place + 1], k[place] : k[place + 1]], own)
        for place, own in enumerate(grid.sequences)
    ]


def _attend(
    case: Draw,
    strategy: Strategy,
    mask: BlockMask,
    layout: SequenceLayout,
    group: SequenceGroup,
    local: list[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    plan = _plan_of(case, strategy, mask, layout)
    attend = DualBalancedAttention.prepare(
        plan, mask, layout, group, n_local=local[0].shape[2], kernel=case.kernel, debug=case.debug
    )
    return attend(*local, scale=scale * case.width**-0.5)


def _plan_of(case: Draw, strategy: Strategy, mask: BlockMask, layout: SequenceLayout) -> Plan:
    name = "contiguous" if case.planner == "random" else case.planner
    plan = make_plan(mask, strategy, name, layout=layout, keys=case.keys, precision=case.precision)
    if case.planner != "random":
        return plan
    return random_owners(plan, mask, case.seed)


def _expected(mask: BlockMask, tensors: list[torch.Tensor], queries: torch.Tensor) -> torch.Tensor:
    """Of these tokens, in their order: each sequence by itself, dense with its own mask."""
    found, places, first = [], [], 0
    for part in mask.parts:
        q, k, v = (t[:, :, first : first + part.grid.tokens] for t in tensors)
        (here,) = torch.nonzero((queries >= first) & (queries < first + part.grid.tokens), as_tuple=True)
        own = queries[here] - first
        found.append(dense_attention(q[:, :, own], k, v, part, queries=own))
        places.append(here)
        first += part.grid.tokens
    return torch.cat(found, dim=2)[:, :, torch.cat(places).argsort()]


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not found.numel():
        return 0.0
    error = float((found.double() - expected).detach().abs().max()) / max(1.0, float(expected.detach().abs().max()))
    return error if error == error else float("inf")
