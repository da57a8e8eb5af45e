"""Workers of int8 exchanges: what owners are sent, communication dtypes with a fault, and rejected gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from dbsp_core import DualBalancedAttention, SequenceGroup, Strategy, dual_balanced_attention, make_plan
from dbsp_core.comm.exchange import mean_of_tokens
from dbsp_core.planning.comm_dtype import Int8Format
from dbsp_core.planning.plan import Plan
from dbsp_kernels.exchange import CopySegments
from tests.support.attention_cases import Case, Inputs, as_sent
from tests.support.oracle import dense_attention, largest_difference


class Kept(Int8Format):
    """Keeps what it reads."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def read(self, written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.seen.append(written.clone())
        return super().read(written, like)


class ScalesOfAnotherToken(Int8Format):
    """Each token is read with the scale of the one before."""

    def read(self, written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        written = written.clone()
        written[..., -1] = written[..., -1].roll(1, dims=-1)
        return super().read(written, like)


class OwnMean(Int8Format):
    """Every rank subtracts another vector from its keys."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def write(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        segments: Sequence[CopySegments],
        less: Sequence[torch.Tensor | None],
    ) -> None:
        own = [None if mean is None else mean + 0.1 * self.rank for mean in less]
        super().write(tensors, buffer, segments, own)


class OneScaleForAll(Int8Format):
    """All that a rank holds of a head is rounded by one scale: payloads depend on who holds what."""

    def write(
        self,
        tensors: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        segments: Sequence[CopySegments],
        less: Sequence[torch.Tensor | None],
    ) -> None:
        rounded = []
        for tokens, mean in zip(tensors, less, strict=True):
            whole = tokens.float() if mean is None else tokens.float() - mean[:, :, None]
            step = whole.abs().amax(dim=(2, 3), keepdim=True) / 127
            rounded.append((whole / step).round() * step)
        super().write(rounded, buffer, segments, [None] * len(rounded))


FAULTS = {
    "scales of another token": lambda rank: ScalesOfAnotherToken(),
    "another mean on each rank": OwnMean,
    "one scale for all of a rank": lambda rank: OneScaleForAll(),
}


def planned(case: Case, given: Inputs) -> Plan:
    return make_plan(given.mask, case.strategy, layout=given.layout, keys=case.keys, precision="int8")


def error_with(rank: int, world: int, case: Case, fault: str) -> float:
    """The error with one of `FAULTS`, against the same rounded in one process."""
    given = Inputs.from_case(case, rank)
    plan = planned(case, given)
    plan = replace(plan, comm_dtype=FAULTS[fault](rank))
    n_local = given.local[0].shape[2]
    attend = DualBalancedAttention.prepare(plan, given.mask, given.layout, SequenceGroup.from_group(), n_local=n_local)
    q, k, v = as_sent(case, given.full)
    expected = dense_attention(q[:, :, given.mine], k, v, given.mask, given.mine)
    return largest_difference(attend(*given.local)[:, :, given.slots], expected)


def rows_at_owners(rank: int, world: int, case: Case, fault: str | None = None) -> list[tuple[Any, torch.Tensor]]:
    """((tensor, head, block), int32[B, tokens, W]) of every piece that this rank computed with."""
    given = Inputs.from_case(case, rank)
    plan = planned(case, given)
    kept = Kept()
    if fault is not None:
        kept.write = FAULTS[fault](rank).write  # type: ignore[method-assign]
    plan, n_local = replace(plan, comm_dtype=kept), given.local[0].shape[2]
    DualBalancedAttention.prepare(plan, given.mask, given.layout, SequenceGroup.from_group(), n_local=n_local)(
        *given.local
    )
    rows, *slots = kept.seen
    return [*_rows(plan, rank, rows), *_slots(plan, rank, slots)]


def _rows(plan: Plan, rank: int, rows: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    lengths, heads, blocks = plan.grid.q_axis.lengths, *plan.rows_of(rank)
    packed = rows.view(len(rows), len(heads), plan.grid.block_q, -1)
    places = enumerate(zip(heads.tolist(), blocks.tolist(), strict=True))
    return [(("q", head, block), packed[:, place, : lengths[block]]) for place, (head, block) in places]


def _slots(plan: Plan, rank: int, slots: list[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
    lengths, found = plan.grid.k_axis.lengths, []
    for slot, (heads, blocks) in zip(slots, plan.chunks.blocks_for(rank), strict=True):
        for place, (head, block) in enumerate(zip(heads.tolist(), blocks.tolist(), strict=True)):
            both = slot[:, :, place, : lengths[block]]
            found += [(("k", head, block), both[0]), (("v", head, block), both[1])]
    return found


def means(rank: int, world: int, case: Case) -> torch.Tensor:
    given = Inputs.from_case(case, rank)
    return mean_of_tokens(given.local[1], given.layout, SequenceGroup.from_group())


def rejected_gradients(rank: int, world: int, whose: int | None) -> str:
    """What is said where inputs of all ranks need gradients, or of one; nothing of q, k and v may be sent."""
    case = Case(str(Strategy(world, 1)), precision="int8")
    given = Inputs.from_case(case, rank)
    for tensor in given.local:
        tensor.requires_grad_(whose in (None, rank))
    sent = mock.Mock(side_effect=AssertionError("q, k or v was sent"))
    n_local = given.local[0].shape[2]
    attend = DualBalancedAttention.prepare(planned(case, given), given.mask, given.layout, None, n_local=n_local)
    attend.prepared.route.dispatch_exchanges[0].__dict__["run"] = sent
    try:
        attend(*given.local)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def without_gradients(rank: int, world: int) -> float:
    """The error of tensors that require gradients, where none are recorded."""
    case = Case("U1R2", precision="int8")
    given = Inputs.from_case(case, rank)
    q, k, v = (tensor.requires_grad_() for tensor in given.local)
    with torch.no_grad():
        out = dual_balanced_attention(q, k, v, given.mask, "U1R2", layout=given.layout, precision="int8")
    full = as_sent(case, given.full)
    expected = dense_attention(full[0][:, :, given.mine], *full[1:], given.mask, given.mine)
    return largest_difference(out[:, :, given.slots], expected)
