"""The backward of distributed attention on processes, and faults that must be seen; see test_drawn_attentions.py."""

from __future__ import annotations

import contextlib
from unittest.mock import patch

import pytest
import torch

from dbsp_core.comm.exchange_backward import LocalGradients
from dbsp_core.runtime import chunk_attention
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KernelRequirements, require_supported
from tests.support.attention_cases import Case, Inputs, at_padding, attend, whole
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, largest_difference
from tests.support.shared import shared
from tests.support.workers import assert_all_raise


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


@pytest.mark.parametrize("kernel", ["cpu", "reference", "triton"])
def test_gradients_on_processes_equal_those_of_dense_attention(pool, kernel):
    pytest.importorskip("triton")
    case = Case("U2R2", "dbsp", heads=3, tokens=72, text_tokens=21, batch=2, kernel=kernel, seed=4)
    assert all(max(errors) <= 1e-5 for errors in pool(4).run(run_gradients, case))


@pytest.mark.parametrize(
    "sabotage",
    [patch.object(LocalGradients, "add_chunk"), patch.object(chunk_attention, "_attend", another_lse)],
    ids=["a chunk that does not return", "a wrong log-sum-exp"],
)
def test_negative_controls_fail(threads, sabotage):
    case = Case("U2R2", "random", heads=3, tokens=512, seed=1)
    with sabotage:
        errors = threads(4).run(run_gradients, case)
    assert max(gradients for _, gradients in errors) > 1e-3
    assert all(out <= 1e-5 for out, _ in errors), "the forward is not what is sabotaged"


def test_bad_input_raises(threads):
    message = "rank(s) [1]: the gradient of attention's output has values that are not finite"
    assert_all_raise(threads, 3, message, not_finite, 1)
    assert_all_raise(threads, 2, "was made under torch.inference_mode()", inference_tensors)
    with pytest.raises(UserError, match="it has no backward, but gradients are needed; use cpu or triton"):
        require_supported("sparge", KernelRequirements(backward=True))
