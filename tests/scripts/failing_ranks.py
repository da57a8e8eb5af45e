"""Functions of benchmarks' ranks that fail."""

from __future__ import annotations

import os


def fail_on_one(rank: int, world: int) -> int:
    if rank == 1:
        raise KeyError("the second rank's own fault")
    return rank


def die_on_one(rank: int, world: int) -> int:
    if rank == 1:
        os._exit(3)
    return rank
