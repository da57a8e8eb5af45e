"""int8 in exchanges: the attention of rounded q, k and v, whose bits no strategy and no number of ranks changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_core import Strategy
from scripts.bench.rounding_error import relative_errors
from tests.core.comm import int8_cases as cases
from tests.core.comm.oracle_cases import TOLERANCE, key_cases, plain_cases
from tests.support.attention_cases import Case, run_case, whole
from tests.support.oracle import int8_of
from tests.support.workers import WorkerError

WORLDS = (1, 2, 3, 4, 6)
STRATEGIES = [(world, strategy) for world in WORLDS for strategy in Strategy.all_for(world)]


@pytest.mark.parametrize(("world", "strategy"), STRATEGIES, ids=str)
def test_equals_dense_attention_of_the_rounded(threads, world, strategy):
    for case in plain_cases(strategy)[world % 2 :: 2]:
        errors = threads(world).run(run_case, replace(case, precision="int8"))
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("keys", ["all", "needed"])
@pytest.mark.parametrize(("world", "strategy"), [(2, "U1R2"), (4, "U2R2"), (3, "U3R1"), (4, "U1R4")])
def test_keys_that_are_sent_in_other_ways(threads, world, strategy, keys):
    for case in key_cases(Strategy.parse(strategy), keys)[world % 2 :: 2]:
        errors = threads(world).run(run_case, replace(case, precision="int8"))
        assert all(error <= TOLERANCE for error in errors), (case, errors)


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_the_triton_kernels(pool, strategy):
    pytest.importorskip("triton")
    case = Case(strategy, heads=3, tokens=99, kernel="triton", precision="int8", planner="random")
    assert max(pool(2).run(run_case, case)) <= TOLERANCE


BITS = Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2, width=24, precision="int8")


@pytest.fixture(scope="module")
def alone():
    """int8 numbers and scales of all tokens by tensor, made in one process by numpy."""
    q, k, v = whole(BITS.attention)[1]
    units = (k.double() * 2.0**32).floor().long().sum(dim=2, keepdim=True)
    mean = (units.double() * 2.0**-32 / BITS.tokens).float()
    return {name: int8_of(t.numpy()) for name, t in (("q", q), ("k", k - mean), ("v", v))}


def unequal_pieces(alone, found) -> int:
    """How many pieces of all ranks differ from what one process makes, by a bit or more."""
    unequal = 0
    for (name, head, block), rows in found:
        size = BITS.block_q if name == "q" else BITS.block_k
        here = first_token(name, block), first_token(name, block) + rows.shape[1]
        assert rows.shape[1] <= size
        numbers, scales = (torch.from_numpy(one[:, head, slice(*here)]) for one in alone[name])
        same = rows.view(torch.int8)[..., : BITS.width].equal(numbers) and rows.view(torch.float32)[..., -1].equal(
            scales
        )
        unequal += not same
    return unequal


def first_token(name: str, block: int) -> int:
    axis = BITS.grid.q_axis if name == "q" else BITS.grid.k_axis
    return int(axis.lengths[:block].sum())


WAYS = [
    *((world, str(strategy), "all", "striped") for world, strategy in STRATEGIES),
    (4, "U2R2", "all", "contiguous"), (4, "U1R4", "needed", "contiguous"), (2, "U2R1", "all", "striped"),
]  # fmt: skip


@pytest.mark.parametrize(("world", "strategy", "keys", "layout"), WAYS)
def test_owners_are_sent_the_bits_that_one_process_makes(threads, alone, world, strategy, keys, layout):
    case = replace(BITS, strategy=strategy, keys=keys, layout=layout)
    found = [piece for of_rank in threads(world).run(cases.rows_at_owners, case) for piece in of_rank]
    assert {name for (name, *_), _ in found} == {"q", "k", "v"}
    assert len(found) >= BITS.heads * BITS.grid.nq
    assert unequal_pieces(alone, found) == 0


@pytest.mark.parametrize("fault", ["another mean on each rank", "one scale for all of a rank"])
def test_bits_that_depend_on_ranks_would_be_found(threads, alone, fault):
    case = replace(BITS, strategy="U2R2", layout="striped")
    found = [piece for of_rank in threads(4).run(cases.rows_at_owners, case, fault) for piece in of_rank]
    assert unequal_pieces(alone, found) > len(found) // 10


@pytest.mark.parametrize("fault", list(cases.FAULTS))
@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (4, "U2R2"), (3, "U1R3")])
def test_a_fault_in_the_rounding_does_not_pass(threads, world, strategy, fault):
    case = replace(BITS, strategy=strategy, layout="striped")
    assert max(threads(world).run(run_case, case)) <= TOLERANCE
    assert max(threads(world).run(cases.error_with, case, fault)) > 30 * TOLERANCE


def test_means_have_identical_bits_on_any_number_of_ranks(threads):
    (expected,) = threads(1).run(cases.means, replace(BITS, strategy="U1R1"))
    _, k, _ = whole(BITS.attention)[1]
    assert (expected.double() - k.double().mean(dim=2)).abs().max() < 1e-7
    for world, layout in ((2, "striped"), (3, "contiguous"), (6, "striped")):
        for found in threads(world).run(cases.means, replace(BITS, strategy=f"U1R{world}", layout=layout)):
            assert found.equal(expected)


@pytest.mark.parametrize("outliers", [False, True])
def test_error_against_what_was_not_rounded(outliers):
    errors = relative_errors(1024, 2, outliers)
    assert 3e-3 < errors["int8, k less its mean"] < 7e-3
    assert errors["fp8 e4m3, k less its mean"] > 4 * errors["int8, k less its mean"]
    assert (errors["int8"] > 3 * errors["int8, k less its mean"]) == outliers, "what the mean is for"


@pytest.mark.parametrize("whose", [None, 1])
def test_gradients_are_rejected_on_all_ranks_before_anything_travels(threads, whose):
    said = threads(2).run(cases.rejected_gradients, whose)
    rejection = "precision: int8 has no gradients"
    assert all(rejection in one and "\n" not in one for one in said), said


def test_tensors_that_require_gradients_are_fine_where_none_are_recorded(threads):
    assert max(threads(2).run(cases.without_gradients)) <= TOLERANCE


def test_ranks_that_differ_in_precision_say_so(threads):
    with pytest.raises(WorkerError, match="the plan differs on rank"):
        threads(2).run(_differing)


def _differing(rank: int, world: int) -> float:
    return run_case(rank, world, Case("U2R1", precision=("model", "int8")[rank]))
