"""What the workers of test_gradients run: one attention with its backward, distributed, against the dense oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import torch

from dbsp_core import Strategy
from dbsp_core.comm import exchange
from dbsp_core.comm.exchange_backward import LocalGradients
from dbsp_core.runtime import chunk_attention
from tests.core.comm.oracle_cases import key_cases, pairwise
from tests.support.attention_cases import Case, Inputs, attend, whole
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, largest_difference
from tests.support.shared import shared

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
        padding = torch.ones(here.shape[2], dtype=torch.bool)
        padding[slots] = False
        assert not here.grad[:, :, padding].any(), "padding must have no gradient"
    return errors[0], max(errors[1:])


def identical_bits(rank: int, world: int, case: Case) -> bool:
    """Returns whether two backward passes give identical bits."""
    found = []
    for _ in range(2):
        given = Inputs.from_case(case, rank)
        local = [t.requires_grad_(True) for t in given.local]
        attend(case, given.mask, given.layout, local).square().sum().backward()
        found.append([t.grad for t in local])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def gradcheck(rank: int, world: int, case: Case) -> bool:
    """Runs torch's numeric check of gradients in one process."""
    given = Inputs.from_case(case, rank)
    local = [t.requires_grad_(True) for t in given.local]
    return torch.autograd.gradcheck(lambda *qkv: attend(case, given.mask, given.layout, list(qkv)), local)


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


@contextlib.contextmanager
def sabotaged(how: str) -> Iterator[None]:
    """Makes backward wrong in this way on all ranks, which are threads, within a block."""
    attend = chunk_attention._attend

    def none_but_the_first(self, number, dkv):
        pass

    def another_lse(*args, **kwargs):
        out, lse = attend(*args, **kwargs)
        return out, lse + 0.1

    readers = exchange._readers

    def one_reader(segments):
        return readers(segments)[:1]

    patches = {
        "a chunk that does not return": lambda: patch.object(LocalGradients, "add_chunk", none_but_the_first),
        "a wrong log-sum-exp": lambda: patch.object(chunk_attention, "_attend", another_lse),
        "one reader of a split head": lambda: patch.object(exchange, "_readers", one_reader),
    }
    with patches[how]():
        yield
