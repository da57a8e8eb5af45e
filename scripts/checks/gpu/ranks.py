"""Ranks that are threads on one device, forward and backward against attention written out, and where they wait.

Threads share the device's default stream, so the exchange between them needs no events, and nothing of it is timed.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from dbsp_core import SequenceGroup, SequenceLayout, Strategy
from scripts.checks.gpu import waits
from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.sessions import (
    PREDICTED,
    SMALL,
    TINY,
    UNEQUAL,
    Sizes,
    expected_on_one,
    inputs,
    local,
    session_of,
    whole,
)
from scripts.checks.gpu.setting import MOST_ERROR, Setting
from tests.kernels.packed_inputs import relative_error
from tests.support.thread_ranks import ThreadRanks

MOST_GRADIENT_ERROR = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
MASKS = {"static": UNEQUAL, "predicted": PREDICTED}


def cases(setting: Setting) -> Iterator[Case]:
    """Yields eight ranks in bfloat16, then where they wait, then fewer ranks and float32."""
    dtypes = (torch.float32,) if setting.dry else (torch.bfloat16, torch.float32)
    worlds = (2,) if setting.simulated else (2, 4) if setting.dry else (8, 4, 2)
    kinds = ("static",) if setting.simulated else tuple(MASKS)
    exact = [
        Case(f"{strategy}, {kind}, {str(dtype)[6:]}", partial(one_strategy, setting, strategy, MASKS[kind], dtype))
        for dtype, world in itertools.product(dtypes, worlds)
        for strategy, kind in itertools.product(strategies_of(world), kinds)
    ]
    first = len(exact) if setting.dry else len(strategies_of(8)) * len(kinds)
    yield from exact[:first]
    for strategy in ("U2R1",) if setting.dry else ("U1R1", "U8R1", "U2R4", "U1R8"):
        for kind in ("predicted",) if setting.simulated else waits.KINDS:
            yield Case(f"waits, {strategy}, {kind}", partial(waiting, setting, strategy, kind))
    yield from exact[first:]


def one_strategy(setting: Setting, strategy: str, mask: dict[str, Any], dtype: torch.dtype) -> Iterator[Row]:
    """Compares one attention and its backward."""
    sizes = TINY if setting.dry else SMALL
    *qkv, dout = inputs(setting.device, sizes, dtype)
    expected = expected_on_one(sizes, mask, qkv, dout)
    with launches_one_after_another():
        results = ThreadRanks(Strategy.parse(strategy).world).run(on_rank, setting, sizes, strategy, mask, qkv, dout)
    layout, by_rank = results[0][0], [parts for _, parts in results]
    for (name, limit), right, *shards in zip(limits_of(dtype).items(), expected, *by_rank, strict=True):
        yield Row(f"error of {name}", relative_error(whole(shards, layout), right), "‖·‖", limit)


def waiting(setting: Setting, strategy: str, kind: str) -> Iterator[Row]:
    """Counts waits of one layer's call in a steady step, all ranks together."""
    if setting.device == "cpu":
        raise Skipped("nothing to wait for on a CPU")
    with waits.recorded(setting), launches_one_after_another():
        world = Strategy.parse(strategy).world
        seen = sum(ThreadRanks(world).run(waits.on_rank, setting, strategy, kind), Counter[str]())
    yield Row("waits", float(sum(seen.values())), "", 0.0)
    for where, times in seen.most_common():
        yield Row(f"waits at {where}", float(times))


def limits_of(dtype: torch.dtype) -> dict[str, float]:
    """Returns the largest error of the output and of each gradient."""
    return {"output": MOST_ERROR[dtype]} | dict.fromkeys(("dq", "dk", "dv"), MOST_GRADIENT_ERROR[dtype])


def strategies_of(world: int) -> list[str]:
    return [f"U{world // ring}R{ring}" for ring in (1, 2, 4, 8) if world % ring == 0]


@contextmanager
def launches_one_after_another() -> Iterator[None]:
    """Lets one thread at a time launch a kernel, because a first launch compiles it."""
    from triton.runtime.jit import JITFunction

    lock, run = threading.RLock(), JITFunction.run

    def locked(self: Any, *args: Any, **options: Any) -> Any:
        with lock:
            return run(self, *args, **options)

    with mock.patch.object(JITFunction, "run", locked):
        yield


def on_rank(
    rank: int,
    world: int,
    setting: Setting,
    sizes: Sizes,
    strategy: str,
    mask: dict[str, Any],
    qkv: list[torch.Tensor],
    dout: torch.Tensor,
) -> tuple[SequenceLayout, list[torch.Tensor]]:
    """Returns the layout, and this rank's output and gradients."""
    session = session_of(sizes, SequenceGroup.from_group(), strategy, mask)
    layout = session.begin(sizes.video, timestep=900.0, device=setting.device)
    mine = [local(one, layout, rank).requires_grad_(True) for one in qkv]
    out = session.attend(0, *mine)
    # The engine has one thread per GPU, in which a rank's exchange would wait for ranks that need the same thread.
    with torch.autograd.set_multithreading_enabled(False):
        out.backward(local(dout, layout, rank))
    session.end()
    session.flush()
    return layout, [out.detach(), *(one.grad for one in mine)]
