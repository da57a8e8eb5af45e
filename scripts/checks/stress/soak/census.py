"""Census of a process: memory, descriptors, threads, groups, objects, and entries of db-SP's own containers."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Iterator, Mapping, MutableSequence, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

RESIDENT, IN_USE = "MB", "MB in use"
_LIBC = ctypes.CDLL(None)


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten numbers, of which `hblkhd` is the fifth and `uordblks` the eighth."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def count_process(rank: int, world: int) -> dict[str, float]:
    """Counts this process, once its bounded caches are empty and free memory is given back to the system.

    MB: anonymous memory that is resident: pages of libraries, which the system maps in and drops, are not in it
    MB in use: of what `malloc` gave out, not given back yet: other than the former, it knows no holes
    objects: of db-SP's classes;  entries: of containers in them and in db-SP's modules, and of its `lru_cache`s
    tensors: alive;  everything: objects that Python's garbage collector knows
    What was there at `gc.freeze` is not counted among objects and tensors.
    """
    for cache in _caches(_holders()):
        if cache.cache_parameters()["maxsize"] is not None:  # filled in its own time, and then never larger
            cache.cache_clear()
    gc.collect()
    gc.collect()  # what finalizers of the first made free
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    alive = gc.get_objects()
    ours = [one for one in alive if str(type(one).__module__).startswith("dbsp_")]
    return _of_process() | {
        "groups": len(distributed_c10d._world.pg_map),
        "objects": len(ours),
        "entries": _entries(ours),
        "tensors": sum(issubclass(type(one), torch.Tensor) for one in alive),
        "everything": len(alive),
    }


def _of_process() -> dict[str, float]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (resident,) = (int(line.split()[1]) / 2**10 for line in lines if line.startswith("RssAnon:"))
    in_use = resident
    if hasattr(_LIBC, "mallinfo2"):  # glibc has it from 2.33 on
        _LIBC.mallinfo2.restype = _MallInfo2
        numbers = _LIBC.mallinfo2().numbers
        in_use = (numbers[4] + numbers[7]) / 2**20
    descriptors, threads = (len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
    return {RESIDENT: resident, IN_USE: in_use, "descriptors": descriptors, "threads": threads}


def _holders(ours: Sequence[object] = ()) -> list[Mapping[str, object]]:
    """Returns the attributes of db-SP's modules, of classes in them, and of objects."""
    holders = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("dbsp_")]
    holders += [vars(value) for holder in holders for value in list(holder.values()) if isinstance(value, type)]
    return holders + [vars(one) for one in ours if hasattr(one, "__dict__")]


def _held(holders: Sequence[Mapping[str, object]]) -> list[object]:
    """Returns each value of attributes once."""
    values = (getattr(value, "__func__", value) for holder in holders for value in list(holder.values()))
    return list({id(value): value for value in values}.values())


def _caches(holders: Sequence[Mapping[str, object]]) -> Iterator[Any]:
    return (value for value in _held(holders) if isinstance(value, functools._lru_cache_wrapper))


def _entries(ours: Sequence[object]) -> int:
    """Counts what is in containers and caches of db-SP's modules, of classes in them, and of objects."""
    holders = _holders(ours)
    containers = (value for value in _held(holders) if isinstance(value, (Mapping, Set, MutableSequence)))
    return sum(map(len, containers)) + sum(cache.cache_info().currsize for cache in _caches(holders))
