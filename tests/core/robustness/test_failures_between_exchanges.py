"""What fails on one rank alone, in any step of a first pass, of a new plan or of backward, is raised on all ranks."""

from __future__ import annotations

import pkgutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dbsp_core.masks.grid import Video
from tests.support.outcomes import said
from tests.support.settings import session_of

HEADS, WIDTH, THW = 4, 16, (2, 4, 8)
SPARGE = {"mask": {"source": "sparge", "cdf": 0.6, "similarity": -1.0, "block_q": 8, "block_k": 8}}
WINDOW = {"mask": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16}}
RUNTIME = "dbsp_core.runtime"
PREDICTED = {
    "planner": f"{RUNTIME}.size.plan_from_counts",
    "mask source": "dbsp_core.sources.sparge.SpargeSource.mask",
    "sums of blocks": "dbsp_core.comm.block_pooling.sum_tokens",
    "choice of blocks": "dbsp_core.sources.sparge.select_blocks",
    "counts": f"{RUNTIME}.slot.RowCounts",
    "choice of a kernel": f"{RUNTIME}.size.choose_kernel",
}
KNOWN = {
    "planner": f"{RUNTIME}.size.make_plan",
    "mask source": "dbsp_core.sources.window.WindowSource.mask",
    "mask's name": f"{RUNTIME}.mask_provider.MaskProvider.cache_key",
    "choice of a kernel": f"{RUNTIME}.prepared.choose_kernel",
}
BOTH = {
    "size": f"{RUNTIME}.size.SequenceLayout.named",
    "routes": f"{RUNTIME}.prepared.build_route",
    "tables": f"{RUNTIME}.prepared.build_tables",
    "send buffer": "dbsp_core.comm.exchange.Exchange.send_buffer",
    "unpacking": "dbsp_core.comm.exchange.Exchange.deliver",
    "kernel": f"{RUNTIME}.chunk_attention.block_attention",
    "return": "dbsp_core.comm.exchange.Route.combine",
}
BACKWARD = {
    "backward kernel": f"{RUNTIME}.backward.block_attention_backward",
    "gradient's buffer": "dbsp_core.runtime.backward._packed",
}
ODD = threading.local()
"""`step` is what fails in this thread, which is a rank."""


def failing(step: str, target: str) -> Any:
    """Patches a step of the product so that it fails where `ODD` says so."""
    module, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(module)
    original = getattr(owner, name)

    def either(*args: Any, **options: Any) -> Any:
        if getattr(ODD, "step", None) == step:
            raise MemoryError(f"no room for {step}")
        return original(*args, **options)

    return mock.patch.object(owner, name, either)


@contextmanager
def fault(step: str, rank: int, odd: int) -> Iterator[None]:
    ODD.step = step if rank == odd else None
    try:
        yield
    finally:
        ODD.step = None


def attend(session: Any, seed: int, gradients: bool = False) -> torch.Tensor:
    """Runs a pass of one attention, and its backward if there are `gradients`; returns its output."""
    layout = session.begin(Video(THW), timestep=900.0 - seed)
    draws = torch.Generator().manual_seed(10 * seed + session.group.rank)
    qkv = torch.randn(3, 1, HEADS, layout.shard, WIDTH, generator=draws)
    qkv[0] *= torch.arange(HEADS).roll(seed)[:, None, None]  # sparse in one head, dense in another, by turns
    q, k, v = (t.requires_grad_(gradients) for t in qkv)
    out: torch.Tensor = session.attend(0, q, k, v)
    if gradients:
        out.square().sum().backward()
    return out.detach()


def run(
    rank: int, world: int, step: str, settings: dict[str, Any], strategy: str, odd: int, before: int, gradients: bool
) -> tuple[str, bool]:
    """Attends `before` times, then with a fault, then without; returns what the fault said, and whether all is right.

    Every pass but the one with the fault must be as in a session that had none.
    """
    sound, session = (session_of(settings, strategy, HEADS) for _ in range(2))
    for seed in range(before):
        attend(session, seed), attend(sound, seed)
    with fault(step, rank, odd):
        answer = said(lambda: attend(session, before, gradients))
    again = [attend(one, before + 1, gradients) for one in (session, sound)]
    return answer, bool(torch.allclose(*again, atol=1e-6))


CASES = [
    *(("predicted", SPARGE, step, 0, False) for step in PREDICTED | BOTH),
    *(("known", WINDOW, step, 0, False) for step in KNOWN | BOTH),
    *(("a new plan", SPARGE | {"reuse": 1.0}, step, 3, False) for step in ("planner", "routes")),
    *(("backward", WINDOW, step, 0, True) for step in BACKWARD),
]


@pytest.mark.parametrize(("number", "case"), list(enumerate(CASES)), ids=str)
def test_failure_is_raised_on_all_ranks(threads, number, case):
    """Fails in a first attention, in one with a new plan, or in the first backward; ranks and strategies alternate."""
    when, settings, step, before, gradients = case
    target = ((KNOWN if when == "known" else PREDICTED) | BOTH | BACKWARD)[step]
    odd, strategy = number % 2, ("U1R2", "U2R1")[number // 2 % 2]
    with failing(step, target):
        for answer, right in threads(2).run(run, step, settings, strategy, odd, before, gradients):
            assert (answer, right) == (f"ValueError: rank(s) [{odd}]: MemoryError: no room for {step}", True)


def recompute(rank: int, world: int, step: str, odd: int) -> str:
    """Returns what backward says where a reentrant checkpoint's attention fails when it is computed again."""
    session = session_of(WINDOW, "U1R2", HEADS)
    q = torch.ones(1, HEADS, session.begin(Video(THW), timestep=900.0).shard, WIDTH, requires_grad=True)
    out = checkpoint(session.attend, 0, q, q, q, use_reentrant=True)
    with fault(step, rank, odd):
        return said(lambda: out.square().sum().backward())


@pytest.mark.parametrize(("step", "odd"), [("kernel", 0), ("return", 1)])
def test_failure_where_an_attention_is_first_computed_with_gradients_is_raised_on_all_ranks(threads, step, odd):
    with failing(step, BOTH[step]):
        answers = threads(2).run(recompute, step, odd)
    assert answers == [f"ValueError: rank(s) [{odd}]: MemoryError: no room for {step}"] * 2
