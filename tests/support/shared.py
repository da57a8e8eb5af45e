"""Results that the ranks and cases of a process share: each is made once, by whichever thread comes first."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
MOST = 64  # results kept of one function


def shared(function: Callable[..., Result]) -> Callable[..., Result]:
    """Keeps a function's latest results, which must not be changed."""
    kept, lock = functools.lru_cache(maxsize=MOST)(function), threading.RLock()

    @functools.wraps(function)
    def call(*args: Any) -> Result:
        with lock:
            return kept(*args)

    return call
