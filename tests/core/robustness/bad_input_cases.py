"""What the workers run: calls that must fail identically on every rank, and leave the workers able to go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    dual_balanced_attention,
    make_plan,
)
from dbsp_core.config import DbspConfig
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.process import package_versions

TOKENS, HEADS, WIDTH = 200, 3, 8


def a_mask(seed: int = 0) -> BlockMask:
    generator = torch.Generator().manual_seed(seed)
    grid = BlockGrid.uniform(TOKENS, block=16)
    return BlockMask(torch.rand(HEADS, grid.nq, grid.nk, generator=generator) < 0.5, grid)


def local_inputs(rank: int, world: int) -> list[torch.Tensor]:
    n_local = len(SequenceLayout.contiguous(TOKENS, world).tokens_at(rank)[0])
    return [torch.randn(1, HEADS, n_local, WIDTH) for _ in range(3)]


def call(rank: int, world: int, options: dict[str, Any]) -> None:
    """One attention with settings that may not fit."""
    options = {"strategy": f"U{world}R1", **options}
    dual_balanced_attention(*local_inputs(rank, world), a_mask(), **options)


def call_with_wrong_shapes(rank: int, world: int) -> None:
    dual_balanced_attention(*(t[:, :2] for t in local_inputs(rank, world)), a_mask(), f"U{world}R1")


def call_where_one_rank_differs(rank: int, world: int, culprit: int, fault: str) -> None:
    """Under debug, what only one rank can see must stop all of them."""
    q, k, v = local_inputs(rank, world)
    mask, home, scale, options, versions = a_mask(), "contiguous", 0.5, {"debug": True}, {}
    if rank == culprit:
        home = "striped" if fault == "other layout" else home
        scale = 0.6 if fault == "other scale" else scale
        options |= {"other kernel": {"kernel": "reference"}, "no debug": {"debug": False}}.get(fault, {})
        versions = {"triton": "0.0"} if fault == "other version" else {}
        if fault == "not finite":
            k[0, 1, 2, 3] = torch.nan
        if fault == "other mask":
            mask = a_mask(seed=1)
        if fault == "other shape":
            q = q[:, :2]
    strategy = Strategy(1, world)
    layout = SequenceLayout.named(home, mask.grid, strategy)
    plan = make_plan(mask, strategy, layout=SequenceLayout.contiguous(TOKENS, world))
    with mock.patch("dbsp_core.utils.process.package_versions", return_value=package_versions() | versions):
        attend = DualBalancedAttention.prepare(
            plan, mask, layout, SequenceGroup.from_group(), n_local=k.shape[2], **options
        )
    attend(q, k, v, scale=scale)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def call_with_unfit_inputs(rank: int, world: int, where: str, fault: str, culprits: list[int]) -> None:
    """The function's, an executor's or a session's attention, with inputs of some ranks that none can serve."""
    attend, q = _attention(where, rank, world)
    if rank not in culprits:
        fault = ""
    if fault == "forward mode":
        with forward_ad.dual_level():
            attend(forward_ad.make_dual(q, q), q, q)
    elif fault == "jvp":
        torch.func.jvp(lambda tangent: attend(q, tangent, q), (q,), (q,))
    elif fault == "grad":
        torch.func.grad(lambda v: attend(q, q, v).sum())(q)
    elif fault == "vmap":
        torch.func.vmap(lambda one: attend(one, one, one))(q[None])
    elif fault == "dtype":
        attend(q.bfloat16(), q, q)
    elif fault == "batch":
        attend(q[:0], q[:0], q[:0])
    elif fault == "width":
        attend(q[..., :0], q[..., :0], q[..., :0])
    elif fault == "turned":
        attend(*[q.transpose(1, 2)] * 3)
    else:
        attend(q, q, q)


def call_inside_a_transform(rank: int, world: int) -> None:
    """A session's whole forward pass, as it is where a transformer is differentiated."""
    session = _session(world)

    def loss(scale: torch.Tensor) -> torch.Tensor:
        q = torch.ones(1, HEADS, session.begin(Video((2, 10, 10)), timestep=900.0).shard, WIDTH) * scale
        return session.attend(0, q, q, q).sum()

    torch.func.grad(loss)(torch.ones(()))


def _attention(where: str, rank: int, world: int) -> tuple[Attend, torch.Tensor]:
    """Not called yet, and a tensor that it takes."""
    mask, q = a_mask(), local_inputs(rank, world)[0]
    if where == "function":
        return lambda q, k, v: dual_balanced_attention(q, k, v, mask, f"U{world}R1"), q
    if where == "executor":
        layout = SequenceLayout.contiguous(TOKENS, world)
        plan = make_plan(mask, Strategy(1, world), layout=layout)
        return DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup.from_group(), n_local=q.shape[2]), q
    session = _session(world)
    layout = session.begin(Video((2, 10, 10)), timestep=900.0)
    return lambda q, k, v: session.attend(0, q, k, v), torch.randn(1, HEADS, layout.shard, WIDTH)


def _session(world: int) -> AttentionSession:
    source = {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}
    return AttentionSession(
        DbspConfig.load({"mask": source}), SequenceGroup.from_group(), Strategy(1, world), HEADS, 1
    )


def call_with_another_strategy(rank: int, world: int, culprit: int, other: str) -> None:
    strategy = other if rank == culprit else f"U{world}R1"
    dual_balanced_attention(*local_inputs(rank, world), a_mask(), strategy)


def call_with_other_things(rank: int, world: int, what: str, culprit: int) -> None:
    """One rank's arguments are of other types, or in another order."""
    mask, strategy = a_mask(), f"U{world}R1"
    given: dict[str, tuple[Any, Any]] = {
        "bits": (mask.bits, strategy),
        "array": (mask.bits.numpy(), strategy),
        "swapped": (strategy, mask),
        "number": (mask, world),
        "auto": (mask, "auto"),
    }
    chosen = given[what] if rank == culprit else (mask, strategy)
    dual_balanced_attention(*local_inputs(rank, world), *chosen)


def equal_by_process_group(rank: int, world: int) -> bool:
    """Whether the function and an executor answer identically, given torch's process group or ours."""
    mask, inputs, layout = a_mask(), local_inputs(rank, world), SequenceLayout.contiguous(TOKENS, world)
    plan, found = make_plan(mask, f"U1R{world}", layout=layout), []
    for group in (SequenceGroup.from_group(), dist.group.WORLD, None):
        found.append(dual_balanced_attention(*inputs, mask, f"U1R{world}", group=group))
        attend = DualBalancedAttention.prepare(plan, mask, layout, group, n_local=inputs[0].shape[2])
        found.append(attend(*inputs))
    return all(torch.equal(one, found[0]) for one in found)
