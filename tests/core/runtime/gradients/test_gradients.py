"""The backward of distributed attention: every UxRy on 1 to 8 ranks against autograd of dense attention."""

from __future__ import annotations

import pytest
import torch

from dbsp_core import Strategy
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS, KernelRequirements, require_supported
from tests.core.runtime.gradients.gradient_cases import (
    cases_for,
    gradcheck,
    identical_bits,
    inference_tensors,
    not_finite,
    run_gradients,
    sabotaged,
)
from tests.support.attention_cases import Case
from tests.support.long import some_long
from tests.support.workers import assert_all_raise

WORLDS = (1, 2, 3, 4, 6, 8)
LONG = ("U1R6", "U6R1", "U1R8", "U2R4", "U4R2", "U3R2")


@pytest.mark.parametrize(
    ("world", "strategy"), some_long([(w, s) for w in WORLDS for s in Strategy.all_for(w)], LONG), ids=str
)
def test_gradients_equal_those_of_dense_attention(threads, world, strategy):
    for case, tolerance in cases_for(strategy):
        errors = threads(world).run(run_gradients, case)
        assert all(max(error) <= tolerance for error in errors), (case, errors)


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (2, "U2R1"), (3, "U1R3"), (4, "U2R2")])
def test_gradients_of_the_reference_kernel_equal_those_of_dense_attention(threads, world, strategy):
    case = Case(strategy, "dbsp", heads=3, tokens=120, text_tokens=21, batch=2, kernel="reference", seed=world)
    assert all(max(errors) <= 1e-5 for errors in threads(world).run(run_gradients, case))


@pytest.mark.parametrize(("world", "strategy"), [(2, "U2R1"), (3, "U1R3"), (4, "U2R2")])
def test_gradients_of_the_triton_kernel_equal_those_of_dense_attention(pool, world, strategy):
    pytest.importorskip("triton")
    case = Case(strategy, "dbsp", heads=3, tokens=72, text_tokens=21, batch=2, kernel="triton", seed=world)
    assert all(max(errors) <= 1e-5 for errors in pool(world).run(run_gradients, case))


@pytest.mark.parametrize(
    ("sabotage", "world", "strategy"),
    [
        ("a chunk that does not return", 3, "U1R3"),
        ("a chunk that does not return", 4, "U2R2"),
        ("a wrong log-sum-exp", 2, "U2R1"),
        ("one reader of a split head", 4, "U4R1"),
    ],
)
def test_negative_controls_fail(threads, sabotage, world, strategy):
    case = Case(strategy, "random", heads=3, tokens=128 * world, seed=1)
    assert all(max(errors) <= 1e-5 for errors in threads(world).run(run_gradients, case))
    with sabotaged(sabotage):
        errors = threads(world).run(run_gradients, case)
    assert max(gradients for _, gradients in errors) > 1e-3
    assert all(out <= 1e-5 for out, _ in errors), "the forward is not what is sabotaged"


@pytest.mark.parametrize(("world", "strategy"), [(2, "U1R2"), (4, "U4R1")])
def test_gradients_are_bitwise_identical_each_time(threads, world, strategy):
    assert all(threads(world).run(identical_bits, Case(strategy, "random", heads=5, seed=3)))


def test_gradcheck_of_torch_passes(threads):
    case = Case("U1R1", heads=2, tokens=9, text_tokens=2, block_q=4, block_k=2, head_dim=2, dtype=torch.float64)
    assert threads(1).run(gradcheck, case) == [True]


class TestBadInput:
    def test_gradient_that_is_not_finite_raises(self, threads):
        message = "rank(s) [1]: the gradient of attention's output has values that are not finite"
        assert_all_raise(threads, 3, message, not_finite, 1)

    def test_tensors_of_inference_mode_raise(self, threads):
        assert_all_raise(threads, 2, "was made under torch.inference_mode()", inference_tensors)

    def test_kernel_without_a_backward_raises(self):
        needs = KernelRequirements(backward=True)
        assert KERNELS["sparge"].why_unsupported_anywhere(needs) == "it has no backward, and gradients are asked for"
        with pytest.raises(UserError, match="it has no backward, and gradients are asked for; use cpu or triton"):
            require_supported("sparge", needs)
