"""Steps of several runs of an engine that take turns, so that all of them meet the same weather of the machine.

Each run has ranks of its own, which wait in their store while others make a step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.checks.engines.runs import LAYERS, LONGEST_S, Case, run

WARM_UP = 3
"""Steps that are not timed: the first ones plan, and prepare kernels."""
COPIES = ("copy_", "clone", "_to_copy", "cat", "index", "index_select", "index_copy_", "index_put_", "gather")
"""Operations that move tokens and compute nothing."""
_FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "detach", "set_", "is_same_size")
_WAITS = ("wait", "barrier", "wait_tensor")


class OperationCount(TorchDispatchMode):
    """Counts what torch is asked for: collectives, copies, and all operations that a GPU would launch a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        view = any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)
        if "c10d" in namespace:
            self.counts["collectives"] += not name.strip("_").startswith(_WAITS)
        elif not view and name not in _FREE:
            self.counts["operations"] += 1
            self.counts["copies"] += name in COPIES
        return func(*args, **kwargs or {})


def take_turns(case: Case, step: Callable[[int], Any]) -> dict[str, Any]:
    """Makes steps 0, 1, …, of which the first ones warm up, one is counted, and others wait for their turn.

    Returns:
        "seconds" of each turn on this rank, and "counts" of one step, over its layers.
    """
    address, _, name = case.turns.partition("/")
    host, _, port = address.partition(":")
    rank, store = os.environ["RANK"], dist.TCPStore(host, int(port), timeout=timedelta(seconds=LONGEST_S))
    with torch.no_grad():
        for number in range(WARM_UP):
            step(number)
        with OperationCount() as counted:
            step(WARM_UP)
        store.set(f"{name}/ready/{rank}", "")
        store.wait([f"{name}/turns"])
        seconds = []
        for turn in range(int(store.get(f"{name}/turns"))):
            store.wait([f"{name}/{turn}"])
            start = time.perf_counter()
            step(WARM_UP + 1 + turn)
            seconds.append(time.perf_counter() - start)
            store.set(f"{name}/{turn}/{rank}", "")
    return {"seconds": seconds, "counts": {what: count / LAYERS for what, count in counted.counts.items()}}


def alternate(
    engine: str, ulysses: int, ring: int, runs: Sequence[Sequence[Case]], turns: int
) -> list[list[dict[str, Any]]]:
    """Returns what `take_turns` found for each case of each run.

    All runs go on at once, with their first cases, then with their second ones: they make one step after another.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LONGEST_S))
    ranks = range(ulysses * ring)
    with ThreadPoolExecutor(len(runs)) as threads:
        started = []
        for number, cases in enumerate(runs):
            named = (
                replace(case, turns=f"127.0.0.1:{store.port}/{number}-{index}") for index, case in enumerate(cases)
            )
            started.append(threads.submit(run, engine, ulysses, ring, *named))
        for index in range(len(runs[0])):
            names = [f"{number}-{index}" for number in range(len(runs))]
            await_keys(store, [f"{name}/ready/{rank}" for name in names for rank in ranks], started)
            for name in names:
                store.set(f"{name}/turns", str(turns))
            for turn in range(turns):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    store.set(f"{name}/{turn}", "")
                    await_keys(store, [f"{name}/{turn}/{rank}" for rank in ranks], started)
        return [future.result() for future in started]


def await_keys(store: dist.TCPStore, keys: list[str], runs: Sequence[Future[Any]]) -> None:
    """Waits until ranks have set keys. Raises what one of the runs raised."""
    while not store.check(keys):
        for ended in (future for future in runs if future.done()):
            if not store.check(keys):
                raise RuntimeError(f"a run ended before its turn: {ended.result()}")
        time.sleep(0.005)


def ratio(of: dict[str, Any], to: dict[str, Any]) -> float:
    """Returns the median over turns of how much longer the one's step takes than the other's."""
    return statistics.median(one / other for one, other in zip(of["seconds"], to["seconds"], strict=True))
