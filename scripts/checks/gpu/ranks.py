"""Step 2: ranks that are threads on one device, every UxRy, forward and backward, against attention written out.

Threads share the device's default stream, so the exchange between them needs no events, and nothing of it is timed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from dbsp_core import SequenceGroup, SequenceLayout, Strategy
from scripts.checks.gpu.journal import Case, Row
from scripts.checks.gpu.sessions import (
    PREDICTED,
    SMALL,
    TINY,
    UNEQUAL,
    Sizes,
    expected_on_one,
    local,
    session_of,
    whole,
)
from scripts.checks.gpu.setting import MOST_ERROR, Setting
from tests.kernels.packed_inputs import relative_error
from tests.support.thread_ranks import ThreadRanks

MOST_GRADIENT_ERROR = {torch.float32: 5e-5, torch.bfloat16: 2e-2}
MASKS = {"static": UNEQUAL, "predicted": PREDICTED}
POISON = True
"""Whether torch fills what it leaves uninitialised with NaN."""


def cases(setting: Setting) -> Iterator[Case]:
    dtypes = (torch.float32,) if setting.dry else (torch.float32, torch.bfloat16)
    worlds = (2,) if setting.simulated else (2, 4) if setting.dry else (2, 4, 8)
    kinds = ("static",) if setting.simulated else tuple(MASKS)
    for dtype, world in itertools.product(dtypes, worlds):
        for strategy, kind in itertools.product(strategies_of(world), kinds):
            run = partial(one_strategy, setting, strategy, MASKS[kind], dtype)
            yield Case(f"{strategy}, {kind}, {str(dtype)[6:]}", run)


def inputs(setting: Setting, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Draws q, k, v and the gradient of the output, [1, H, N, D] each, of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    shape = (4, 1, sizes.heads, sizes.video.tokens, sizes.head_dim)
    return list(torch.randn(shape, generator=generator).to(setting.device, dtype))


def one_strategy(setting: Setting, strategy: str, mask: dict[str, Any], dtype: torch.dtype) -> Iterator[Row]:
    """Compares one attention and its backward."""
    sizes = TINY if setting.dry else SMALL
    *qkv, dout = inputs(setting, sizes, dtype)
    expected = expected_on_one(sizes, mask, qkv, dout)
    with launches_one_after_another():
        found = ThreadRanks(Strategy.parse(strategy).world).run(on_rank, setting, sizes, strategy, mask, qkv, dout)
    layout, by_rank = found[0][0], [parts for _, parts in found]
    for (name, limit), right, *mine in zip(limits_of(dtype).items(), expected, *by_rank, strict=True):
        yield Row(f"error of {name}", relative_error(whole(mine, layout), right), "‖·‖", limit)


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
