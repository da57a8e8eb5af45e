"""int8 in exchanges: the attention of rounded q, k and v, whose bits no strategy and no number of ranks changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import DualBalancedAttention, make_plan
from dbsp_core.planning.comm_dtype import CommDtype
from dbsp_core.planning.plan import Plan
from tests.support.attention_cases import Case, Inputs, as_sent, at_padding, run_case, whole
from tests.support.oracle import dense_attention, hadamard, int8_of, largest_difference, run_of, signs
from tests.support.workers import assert_all_raise


class Kept(CommDtype):
    """Keeps what it reads."""

    def __init__(self) -> None:
        super().__init__("int8")
        object.__setattr__(self, "seen", [])

    def read(self, written: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.seen.append(written.clone())
        return super().read(written, like)


class OwnMean(CommDtype):
    """Every rank subtracts another vector from its keys."""

    def __init__(self, rank: int) -> None:
        super().__init__("int8")
        object.__setattr__(self, "rank", rank)

    def write(self, tensors, buffer, segments, less, *, rotate=True) -> None:
        own = [None if mean is None else mean + 0.1 * self.rank for mean in less]
        super().write(tensors, buffer, segments, own)


def prepared(rank: int, case: Case, comm_dtype: CommDtype | None = None) -> tuple[Inputs, DualBalancedAttention]:
    """Returns a rank's inputs and attention with int8 exchanges."""
    given = Inputs.from_case(case, rank)
    plan = make_plan(given.mask, case.strategy, layout=given.layout, keys=case.keys, precision="int8")
    plan = plan if comm_dtype is None else replace(plan, comm_dtype=comm_dtype)
    n_local = given.local[0].shape[2]
    return given, DualBalancedAttention.prepare(plan, given.mask, given.layout, None, n_local=n_local)


def error_of(case: Case, given: Inputs, out: torch.Tensor) -> float:
    """Returns how far outputs are from attention of what one process rounds."""
    q, k, v = as_sent(case, given.full)
    return largest_difference(
        out[:, :, given.slots], dense_attention(q[:, :, given.mine], k, v, given.mask, given.mine)
    )


def rows_at_owners(rank: int, world: int, case: Case, own_mean: bool = False) -> list[tuple[Any, torch.Tensor]]:
    """Returns ((tensor, head, block), int32[B, tokens, W]) of every piece that this rank computed with."""
    kept = Kept()
    if own_mean:
        object.__setattr__(kept, "write", OwnMean(rank).write)
    given, attend = prepared(rank, case, kept)
    attend(*given.local)
    rows, *slots = kept.seen
    plan = attend.prepared.plan
    return [*_rows(plan, rank, rows), *_slots(plan, rank, slots)]


def _rows(plan: Plan, rank: int, rows: torch.Tensor) -> list[tuple[Any, torch.Tensor]]:
    lengths, heads, blocks = plan.grid.q_axis.lengths, *plan.rows_of(rank)
    packed = rows.view(len(rows), len(heads), plan.grid.block_q, -1)
    numbered = enumerate(zip(heads.tolist(), blocks.tolist(), strict=True))
    return [(("q", head, block), packed[:, index, : lengths[block]]) for index, (head, block) in numbered]


def _slots(plan: Plan, rank: int, slots: list[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
    lengths, found = plan.grid.k_axis.lengths, []
    for slot, (heads, blocks) in zip(slots, plan.chunks.blocks_for(rank), strict=True):
        for index, (head, block) in enumerate(zip(heads.tolist(), blocks.tolist(), strict=True)):
            both = slot[:, :, index, : lengths[block]]
            found += [(("k", head, block), both[0]), (("v", head, block), both[1])]
    return found


def steps_off(rank: int, world: int, case: Case, out_as: str) -> float:
    """Returns how far this rank's outputs are from exact ones, in steps of int8: half a step if rounded once.

    Of both, rotated: the largest difference of a channel over the step of the exact one's token.
    """
    given, attend = prepared(rank, case, CommDtype("int8", out_as))
    out = attend(*given.local)
    assert not at_padding(out, given.slots).any(), "padding must come back as zeros"
    q, k, v = as_sent(case, given.full)
    expected = dense_attention(q[:, :, given.mine], k, v, given.mask, given.mine)
    out, expected = (rotated(tokens) for tokens in (out[:, :, given.slots], expected))
    step = expected.abs().amax(dim=-1, keepdim=True) / 127
    assert out[(step == 0).expand_as(out)].count_nonzero() == 0, "rows without blocks must come back as zeros"
    return float(((out - expected).abs() / step.masked_fill(step == 0, 1)).max()) if out.numel() else 0.0


def rotated(tokens: torch.Tensor) -> torch.Tensor:
    head_dim = tokens.shape[-1]
    return torch.from_numpy(hadamard(tokens.double().numpy() * signs(head_dim)) * run_of(head_dim) ** -0.5)


def rejected_gradients(rank: int, world: int, whose: int | None, out_as: str) -> None:
    """Attends with inputs of all ranks that need gradients, or of one; nothing of q, k and v may be sent."""
    given, attend = prepared(rank, Case(f"U{world}R1", precision="int8"), CommDtype("int8", out_as))
    for tensor in given.local:
        tensor.requires_grad_(whose in (None, rank))
    sent = mock.Mock(side_effect=AssertionError("q, k or v was sent"))
    attend.prepared.route.dispatch_exchanges[0].__dict__["start"] = sent
    attend(*given.local)


@pytest.mark.parametrize("head_dim", [24, 32, 40])
def test_float64_is_rotated_in_float64(threads, head_dim):
    case = Case("U2R2", heads=3, tokens=203, head_dim=head_dim, precision="int8", dtype=torch.float64)
    assert max(threads(4).run(run_case, case)) <= 1e-12


BITS = Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2, head_dim=24, precision="int8")


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (2, "U2R1"), (3, "U1R3"), (6, "U2R3")])
def test_output_is_rounded_once_and_rotated_back(threads, world, strategy):
    case = replace(BITS, strategy=strategy)
    assert 0.4 < max(threads(world).run(steps_off, case, "int8")) <= 0.51
    assert max(threads(world).run(steps_off, case, "model")) < 0.01


@pytest.fixture(scope="module")
def alone():
    """Returns int8 numbers and scales of all tokens by tensor, made in one process by numpy."""
    q, k, v = whole(BITS.attention)[1]
    units = (k.double() * 2.0**32).floor().long().sum(dim=2, keepdim=True)
    mean = (units.double() * 2.0**-32 / BITS.tokens).float()
    return {name: int8_of(t.numpy()) for name, t in (("q", q), ("k", k - mean), ("v", v))}


def unequal_pieces(alone, found) -> int:
    """Counts the pieces of all ranks that differ from what one process makes, by a bit or more."""
    unequal = 0
    for (name, head, block), rows in found:
        size = BITS.block_q if name == "q" else BITS.block_k
        here = first_token(name, block), first_token(name, block) + rows.shape[1]
        assert rows.shape[1] <= size
        numbers, scales = (torch.from_numpy(one[:, head, slice(*here)]) for one in alone[name])
        found_numbers, found_scales = rows.view(torch.int8)[..., : BITS.head_dim], rows.view(torch.float32)[..., -1]
        unequal += not (found_numbers.equal(numbers) and found_scales.equal(scales))
    return unequal


def first_token(name: str, block: int) -> int:
    axis = BITS.grid.q_axis if name == "q" else BITS.grid.k_axis
    return int(axis.lengths[:block].sum())


WAYS = [
    *((1, "U1R1", "all", "striped"), (3, "U3R1", "all", "striped"), (6, "U2R3", "all", "striped")),
    *((4, "U2R2", "all", "contiguous"), (4, "U1R4", "needed", "contiguous")),
]


@pytest.mark.parametrize(("world", "strategy", "keys", "layout"), WAYS)
def test_owners_are_sent_the_bits_that_one_process_makes(threads, alone, world, strategy, keys, layout):
    case = replace(BITS, strategy=strategy, keys=keys, layout=layout)
    found = [piece for of_rank in threads(world).run(rows_at_owners, case) for piece in of_rank]
    assert {name for (name, *_), _ in found} == {"q", "k", "v"}
    assert len(found) >= BITS.heads * BITS.grid.nq
    assert unequal_pieces(alone, found) == 0


def test_bits_that_depend_on_ranks_are_found(threads, alone):
    case = replace(BITS, strategy="U2R2", layout="striped")
    found = [piece for of_rank in threads(4).run(rows_at_owners, case, True) for piece in of_rank]
    assert unequal_pieces(alone, found) > len(found) // 10


@pytest.mark.parametrize(("whose", "out_as"), [(None, "model"), (1, "model"), (1, "int8")])
def test_gradients_are_rejected_on_all_ranks_before_anything_is_sent(threads, whose, out_as):
    assert_all_raise(threads, 2, "precision: int8 does not support gradients", rejected_gradients, whose, out_as)
