"""Mistakes are one clear line on every rank, before any collective is entered: nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    UserError,
    dual_balanced_attention,
    make_plan,
)
from dbsp_core.masks.grid import Video
from dbsp_core.utils.process import package_versions
from tests.support.settings import session_of
from tests.support.workers import assert_all_raise

TOKENS, HEADS, WIDTH = 200, 3, 8
PREDICTED = {"mask": {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}}


def a_mask(seed: int = 0) -> BlockMask:
    generator = torch.Generator().manual_seed(seed)
    grid = BlockGrid.uniform(TOKENS, block=16)
    return BlockMask(torch.rand(HEADS, grid.nq, grid.nk, generator=generator) < 0.5, grid)


def local_inputs(rank: int, world: int) -> list[torch.Tensor]:
    n_local = len(SequenceLayout.contiguous(TOKENS, world).tokens_at(rank)[0])
    return [torch.randn(1, HEADS, n_local, WIDTH) for _ in range(3)]


def call(rank: int, world: int, options: dict[str, Any], culprits: tuple[int, ...] = (0, 1, 2)) -> None:
    """Runs one attention, on some ranks with arguments that may not fit."""
    arguments = {"mask": a_mask(), "strategy": f"U{world}R1"} | (options if rank in culprits else {})
    dual_balanced_attention(*local_inputs(rank, world), **arguments)


def call_where_one_rank_differs(rank: int, world: int, culprit: int, fault: str) -> None:
    """Runs attention with a fault that only one rank can see, under debug unless tokens are too few."""
    q, k, v = local_inputs(rank, world)
    mask, layout_name, scale, versions = a_mask(), "contiguous", 0.5, {}
    options = {"debug": not fault.startswith("fewer tokens"), "n_local": k.shape[2]}
    if rank == culprit:
        layout_name = "striped" if fault == "other layout" else layout_name
        scale = 0.6 if fault == "other scale" else scale
        options |= {
            "other kernel": {"kernel": "reference"},
            "no debug": {"debug": False},
            "fewer tokens prepared for": {"n_local": 20},
        }.get(fault, {})
        versions = {"triton": "0.0"} if fault == "other version" else {}
        k[0, 1, 2, 3] = torch.nan if fault == "not finite" else k[0, 1, 2, 3]
        mask = a_mask(seed=1) if fault == "other mask" else mask
        q = q[:, :2] if fault == "other shape" else q
        q, k, v = (one[:, :, 1:] if fault == "fewer tokens" else one for one in (q, k, v))
    strategy = Strategy(1, world)
    layout = SequenceLayout.named(layout_name, mask.grid, strategy)
    plan = make_plan(mask, strategy, layout=SequenceLayout.contiguous(TOKENS, world))
    with mock.patch("dbsp_core.utils.process.package_versions", return_value=package_versions() | versions):
        attend = DualBalancedAttention.prepare(plan, mask, layout, None, **options)
    attend(q, k, v, scale=scale)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _with_forward_derivative(attend: Attend, q: torch.Tensor) -> None:
    with forward_ad.dual_level():
        attend(forward_ad.make_dual(q, q), q, q)


TRANSFORM = "inside a transform of torch.func"
UNFIT: dict[str, tuple[Callable[[Attend, torch.Tensor], object], str]] = {
    "forward mode": (_with_forward_derivative, "carries a forward-mode derivative (torch.autograd.forward_ad)"),
    "grad": (lambda attend, q: torch.func.grad(lambda v: attend(q, q, v).sum())(q), TRANSFORM),
    "vmap": (lambda attend, q: torch.func.vmap(lambda one: attend(one, one, one))(q[None]), TRANSFORM),
    "dtype": (
        lambda attend, q: attend(q.bfloat16(), q, q),
        "q, k, v must share a dtype, got bfloat16, float32, float32; cast them to one dtype",
    ),
    "batch": (lambda attend, q: attend(*[q[:0]] * 3), "are empty; skip this call"),
    "turned": (
        lambda attend, q: attend(*[q.transpose(1, 2)] * 3),
        "looks like [batch, tokens, heads, D]: transpose(1, 2)",
    ),
}


def call_with_unfit_inputs(rank: int, world: int, where: str, fault: str, culprits: list[int]) -> None:
    """Runs an executor's or a session's attention with unsupported inputs on some ranks."""
    attend, q = _attention(where, rank, world)
    if rank in culprits:
        UNFIT[fault][0](attend, q)
    else:
        attend(q, q, q)


def _attention(where: str, rank: int, world: int) -> tuple[Attend, torch.Tensor]:
    """Returns an attention that was not called yet, and a tensor that it takes."""
    mask, q = a_mask(), local_inputs(rank, world)[0]
    if where == "executor":
        layout = SequenceLayout.contiguous(TOKENS, world)
        plan = make_plan(mask, Strategy(1, world), layout=layout)
        return DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group(), n_local=q.shape[2]), q
    session = session_of(PREDICTED, f"U1R{world}", HEADS)
    layout = session.begin(Video((2, 10, 10)), timestep=900.0)
    return lambda q, k, v: session.attend(0, q, k, v), torch.randn(1, HEADS, layout.shard, WIDTH)


WORLD = 3


def assert_fails_identically(pool, message, function, *args):
    assert_all_raise(pool, WORLD, message, function, *args)
    pool(WORLD).run(call, {})  # the workers are not out of step


@pytest.mark.parametrize(
    ("options", "culprits", "message"),
    [
        ({"strategy": "U2R2"}, (0, 1, 2), "strategy U2R2 needs 2·2 = 4 GPUs, got 3; use one of U3R1, U1R3"),
        ({"kernel": "sparge", "strategy": "U1R3"}, (0, 1, 2), "kernel 'sparge' does not support this plan"),
        ({"mask": a_mask().bits}, (1,), "rank(s) [1]: mask must be a BlockMask, got a Tensor"),
        ({"strategy": "U1R3"}, (1,), "the strategy differs on rank(s) [1]"),
        ({"strategy": "U2R1"}, (1,), "rank(s) [1]: strategy U2R1 needs 2·1 = 2 GPUs"),
    ],
)
def test_arguments_that_do_not_fit(pool, options, culprits, message):
    assert_fails_identically(pool, message, call, options, culprits)


@pytest.mark.parametrize(
    ("culprit", "fault", "message"),
    [
        (0, "not finite", "rank(s) [{}]: q, k or v has values that are not finite"),
        (1, "other mask", "the mask differs on rank(s) [{}]"),
        (2, "other layout", "the sequence layout differs on rank(s) [{}]"),
        (0, "other scale", "the softmax scale differs on rank(s) [{}]"),
        (1, "other kernel", "rank(s) [{}] selected a different attention kernel"),
        (2, "other version", "the version of triton differs on rank(s) [{}]; install the same for all ranks"),
        (0, "no debug", "debug differs on rank(s) [{}]"),
        (1, "other shape", "rank(s) [{}]: q, k, v must be [batch, heads, n_local, D] of one shape"),
        (1, "fewer tokens", "rank(s) [{}]: q of shape (1, 3, 66, 8) does not fit: the plan has 3 heads and rank 1"),
        (1, "fewer tokens prepared for", "rank(s) [{}]: rank 1 has 20 slots, expected 67"),
    ],
)
def test_fault_that_one_rank_sees_is_rejected_on_all(pool, culprit, fault, message):
    assert_fails_identically(pool, message.format(culprit), call_where_one_rank_differs, culprit, fault)


@pytest.mark.parametrize("fault", UNFIT)
def test_unsupported_inputs_are_rejected(pool, fault):
    """Asks an executor or a session, with such inputs on all ranks or on one, by turns."""
    number = list(UNFIT).index(fault)
    where, culprits = ("executor", "session")[number % 2], ([0, 1, 2], [1])[number // 2 % 2]
    said = UNFIT[fault][1] if len(culprits) == WORLD else f"rank(s) {culprits}: q"
    assert_fails_identically(pool, said, call_with_unfit_inputs, where, fault, culprits)


NO_STRATEGY = "expected a strategy of the form UxRy, for example U4R2 for 8 GPUs; "


@pytest.mark.parametrize(
    ("mask", "strategy", "options", "message"),
    [
        (a_mask().bits, "U2R1", {}, "got a Tensor; make one of these bits: BlockMask(bits, BlockGrid.uniform("),
        ("U2R1", a_mask(), {}, "mask must be a BlockMask, got a str; pass the mask first, then the strategy"),
        (a_mask(), 8, {}, NO_STRATEGY + "got 8"),
        (a_mask(), " Auto", {}, NO_STRATEGY + "'auto' is a setting of sessions"),
        (a_mask(), "U2R1", {"precision": "in8"}, "unknown precision 'in8'; use one of model, int8; did you mean"),
        (a_mask(), "U2R1", {"keys": "neded"}, "unknown keys 'neded'; use one of all, needed; did you mean 'needed'"),
    ],
)
def test_plan_with_other_arguments_raises(mask, strategy, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_plan(mask, strategy, **options)
