"""Results that the ranks and cases of a process share: each is made once, by whichever thread comes first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")
MOST = 64  # results kept of one function


def shared(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function whose latest results are kept, and must not be changed."""
    kept, lock = functools.lru_cache(maxsize=MOST)(function), threading.RLock()

    @functools.wraps(function)
    def call(*args: Any) -> Result:
        with lock:
            return kept(*args)

    return call


def reused(make: Callable[[str], Result]) -> Callable[[str], AbstractContextManager[Result]]:
    """What make(name) gives, lent to one case after another: each leaves it as it was; a new one after a failure."""
    kept: dict[str, Result] = {}

    @contextmanager
    def lend(name: str) -> Iterator[Result]:
        made = kept.pop(name, None) or make(name)
        yield made
        kept[name] = made

    return lend
