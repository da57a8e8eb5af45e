"""The backward of distributed attention: every UxRy on 1 to 8 ranks against autograd of dense attention."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dbsp_core import Strategy
from dbsp_core.comm import exchange
from dbsp_core.comm.exchange_backward import LocalGradients
from dbsp_core.runtime import chunk_attention
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KernelRequirements, require_supported
from tests.core.comm.oracle_cases import key_cases, pairwise
from tests.support.attention_cases import Case, Inputs, at_padding, attend, whole
from tests.support.interpreter import interpreted
from tests.support.long import some_long
from tests.support.oracle import dense_attention, largest_difference
from tests.support.shared import shared
from tests.support.workers import assert_all_raise

SHAPES = (
    Case("-", heads=3, tokens=203, block_q=16, block_k=16, head_dim=8),
    Case("-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2),
    Case("-", heads=7, tokens=211, block_q=16, block_k=32, text_tokens=3, head_dim=24, density=0.15),
    Case("-", heads=6, tokens=19 + 5 * 4 * 9, text_tokens=19, thw=(5, 4, 9), block_q=32,
         orders=("thw", "hwt", "wth", "hwt", "tile:3x4x4", "twh")),
)  # fmt: skip
SETTINGS = (
    {"planner": "contiguous", "layout": "striped", "streams": "first", "padded": True},
    {"planner": "paper"},
    {"planner": "dbsp", "layout": "striped", "padded": True},
    {"planner": "random", "layout": "striped"},
)


def cases_for(strategy: Strategy) -> list[tuple[Case, float]]:
    """Returns cases with their tolerances, in float32 and float64 alternately, and one of chunks with some keys."""
    cases = [(case, 1e-5) for case in key_cases(strategy)[strategy.world % 2 :: 2]]
    for index, case in enumerate(pairwise(strategy, SHAPES, SETTINGS)):
        dtype, tolerance = ((torch.float32, 1e-5), (torch.float64, 1e-12))[(index + strategy.ring) % 2]
        cases.append((replace(case, dtype=dtype), tolerance))
    return cases


@shared
def reference(attention: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns dense attention of all tokens, and the gradients of q, k and v."""
    mask, full = whole(attention)
    leaves = [t.detach().double().clone().requires_grad_(True) for t in full]
    expected = dense_attention(*leaves, mask, queries=torch.arange(attention.tokens))
    return expected.detach(), list(torch.autograd.grad((expected * _weights(attention)).sum(), leaves))


def _weights(attention: Case) -> torch.Tensor:
    """Returns the weight of each output in the loss."""
    shape = (attention.batch, attention.heads, attention.tokens, attention.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=attention.dtype)


def run_gradients(rank: int, world: int, case: Case) -> tuple[float, float]:
    """Returns the largest errors on this rank's tokens: of the output, and of the gradients of q, k and v."""
    given = Inputs.from_case(case, rank)
    mine, slots = given.mine, given.slots
    expected, expected_gradients = reference(case.attention)
    local = [t.requires_grad_(True) for t in given.local]
    with interpreted() if case.kernel == "triton" else contextlib.nullcontext():
        out = attend(case, given.mask, given.layout, local)
        (out[:, :, slots] * _weights(case)[:, :, mine]).sum().backward()
    errors = [largest_difference(out[:, :, slots], expected[:, :, mine])]
    for here, everywhere in zip(local, expected_gradients, strict=True):
        assert here.grad is not None
        errors.append(largest_difference(here.grad[:, :, slots], everywhere[:, :, mine]))
        assert not at_padding(here.grad, slots).any(), "padding must have no gradient"
    return errors[0], max(errors[1:])


def not_finite(rank: int, world: int, odd: int) -> None:
    """Runs a backward pass in which the gradient of one rank's output is NaN."""
    case = Case(f"U1R{world}", tokens=world * 32)
    given = Inputs.from_case(case, rank)
    out = attend(case, given.mask, given.layout, [t.requires_grad_(True) for t in given.local])
    out.backward(torch.full_like(out, float("nan") if rank == odd else 1.0))


def inference_tensors(rank: int, world: int) -> None:
    """Runs attention with gradients in which k is a tensor of inference mode."""
    case = Case(f"U1R{world}", tokens=world * 32)
    given = Inputs.from_case(case, rank)
    with torch.inference_mode():
        k = given.local[1].clone()
    attend(case, given.mask, given.layout, [given.local[0].requires_grad_(True), k, given.local[2]])


def another_lse(*args, attend=chunk_attention._attend, **kwargs):
    out, lse = attend(*args, **kwargs)
    return out, lse + 0.1


def one_reader(segments, readers=exchange._readers):
    return readers(segments)[:1]


SABOTAGES = {
    "a chunk that does not return": patch.object(LocalGradients, "add_chunk"),
    "a wrong log-sum-exp": patch.object(chunk_attention, "_attend", another_lse),
    "one reader of a split head": patch.object(exchange, "_readers", one_reader),
}
"""Patches that make backward wrong on all ranks, which are threads."""
WORLDS = (1, 2, 3, 4, 6, 8)
LONG = ("U1R6", "U6R1", "U1R8", "U2R4", "U4R2", "U3R2")


@pytest.mark.parametrize(
    ("world", "strategy"), some_long([(w, s) for w in WORLDS for s in Strategy.all_for(w)], LONG), ids=str
)
def test_gradients_equal_those_of_dense_attention(threads, world, strategy):
    for case, tolerance in cases_for(strategy):
        errors = threads(world).run(run_gradients, case)
        assert all(max(error) <= tolerance for error in errors), (case, errors)


@pytest.mark.parametrize("kernel", ["cpu", "reference", "triton"])
def test_gradients_on_processes_equal_those_of_dense_attention(pool, kernel):
    pytest.importorskip("triton")
    case = Case("U2R2", "dbsp", heads=3, tokens=72, text_tokens=21, batch=2, kernel=kernel, seed=4)
    assert all(max(errors) <= 1e-5 for errors in pool(4).run(run_gradients, case))


@pytest.mark.parametrize(
    ("sabotage", "world", "strategy"),
    [
        ("a chunk that does not return", 4, "U2R2"),
        ("a wrong log-sum-exp", 2, "U2R1"),
        ("one reader of a split head", 4, "U4R1"),
    ],
)
def test_negative_controls_fail(threads, sabotage, world, strategy):
    case = Case(strategy, "random", heads=3, tokens=128 * world, seed=1)
    assert all(max(errors) <= 1e-5 for errors in threads(world).run(run_gradients, case))
    with SABOTAGES[sabotage]:
        errors = threads(world).run(run_gradients, case)
    assert max(gradients for _, gradients in errors) > 1e-3
    assert all(out <= 1e-5 for out, _ in errors), "the forward is not what is sabotaged"


def test_bad_input_raises(threads):
    message = "rank(s) [1]: the gradient of attention's output has values that are not finite"
    assert_all_raise(threads, 3, message, not_finite, 1)
    assert_all_raise(threads, 2, "was made under torch.inference_mode()", inference_tensors)
    with pytest.raises(UserError, match="it has no backward, but gradients are needed; use cpu or triton"):
        require_supported("sparge", KernelRequirements(backward=True))
