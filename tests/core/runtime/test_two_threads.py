"""Two threads of a process on one process group: the second is rejected while the first is within a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Redistribution,
    SequenceGroup,
    SequenceLayout,
    make_plan,
)
from dbsp_core.config import DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.grid import Video
from dbsp_core.runtime.engine_session import EngineSession
from dbsp_core.runtime.session import AttentionSession

HEADS, WIDTH, THW = 4, 8, (2, 4, 4)
TOKENS = 32
GRID = BlockGrid(TOKENS, 0, 4, 4)
COLLECTIVES = "start_all_to_all", "all_gather", "gather_integers"
Call = Callable[[], object]


def of_executor(group: Any, world: int, gradients: bool = False) -> Call:
    """Returns an attention that was called once, as ranks compare at the first call alone; or its backward."""
    mask, layout = BlockMask.dense(HEADS, GRID), SequenceLayout.contiguous(TOKENS, world)
    plan = make_plan(mask, Strategy(world, 1), layout=layout)
    attention = DualBalancedAttention.prepare(plan, mask, layout, group)
    q = torch.ones(1, HEADS, TOKENS // world, WIDTH, requires_grad=gradients)
    loss = attention(q, q, q).sum()
    return partial(loss.backward, retain_graph=True) if gradients else partial(attention, q, q, q)


def of_redistribution(group: Any, world: int) -> Call:
    layouts = SequenceLayout.contiguous(TOKENS, world), SequenceLayout.striped(GRID, Strategy(1, world))
    between = Redistribution.between(*layouts, SequenceGroup.from_group(group))
    call = partial(between.there, torch.ones(TOKENS // world, WIDTH))
    call()
    return call


def session(group: Any, world: int) -> AttentionSession:
    return AttentionSession(DbspConfig(), SequenceGroup.from_group(group), Strategy(world, 1), HEADS, 1)


def of_session(group: Any, world: int) -> Call:
    made, q = session(group, world), torch.ones(1, HEADS, TOKENS // world, WIDTH)
    made.begin(Video(THW))
    return partial(made.attend, 0, q, q, q)


def of_vote(group: Any, world: int) -> Call:
    made = EngineSession(SequenceGroup.from_group(group), Strategy(world, 1), HEADS, 1, "dense")
    return partial(made.all_agree, True)


ENTRIES: dict[str, Callable[[Any, int], Call]] = {
    "executor": of_executor,
    "backward": partial(of_executor, gradients=True),
    "redistribution": of_redistribution,
    "session": of_session,
    "making a session": lambda group, world: partial(session, group, world),
    "vote": of_vote,
}


def in_second_thread(first: Call, second: Call) -> str:
    """Makes the second call in another thread while the first is at its first collective; returns what it raises."""
    inside, messages = threading.Event(), []

    def call() -> None:
        inside.wait()
        try:
            second()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=call)

    def paused(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is not thread and not inside.is_set():
                inside.set()
                thread.join()
            return collective(*args, **kwargs)

        return run

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(SequenceGroup, name, paused(getattr(SequenceGroup, name))))
        thread.start()
        first()
    assert inside.is_set(), "the first call has no collective"
    thread.join()
    return "".join(messages)


def on_one_group(rank: int, world: int, names: tuple[str, str]) -> str:
    first, second = (ENTRIES[name](None, world) for name in names)
    message = in_second_thread(first, second)
    second()  # one after the other, they go on
    return message


@pytest.mark.parametrize("name", ENTRIES)
def test_second_thread_on_one_process_group_is_rejected(pool, name):
    expected = "UserError: two threads run db-SP collectives on one process group; serialize"
    for names in (("executor", name), (name, "session")):
        for message in pool(2).run(on_one_group, names):
            assert message.startswith(expected), message


def on_two_groups(rank: int, world: int) -> str:
    first, second = (ENTRIES[name](dist.new_group(), world) for name in ("session", "backward"))
    return in_second_thread(first, second)


def test_threads_with_a_process_group_each_go_on(pool):
    assert pool(2).run(on_two_groups) == [""] * 2
