"""Census of a process: memory, descriptors, threads, groups, and entries of db-SP's own caches; and what grows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections.abc import Mapping, MutableSequence, Sequence, Set
from pathlib import Path

import numpy as np
import torch
from torch.distributed import distributed_c10d

RESIDENT, IN_USE = "MB", "MB in use"
Series = Sequence[Mapping[str, float]]
_LIBC = ctypes.CDLL(None)


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten numbers, of which `hblkhd` is the fifth and `uordblks` the eighth."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def census() -> dict[str, float]:
    """Counts this process, once garbage has been collected and free memory given back to the system.

    MB: anonymous memory that is resident: pages of libraries, which the system maps in and drops, are not in it
    MB in use: of what `malloc` gave out, not given back yet: other than the former, it knows no holes
    objects: of db-SP's classes;  entries: of containers in them and in db-SP's modules, and of its `lru_cache`s
    tensors, tensor MB: alive;  everything: objects that Python's garbage collector knows
    What was there at `gc.freeze` is not counted among objects and tensors.
    """
    gc.collect()
    gc.collect()  # what finalizers of the first made free
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
    alive = gc.get_objects()
    ours = [one for one in alive if str(type(one).__module__).startswith("dbsp_")]
    tensors = [one for one in alive if issubclass(type(one), torch.Tensor)]
    storages = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors that have none
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return _of_process() | {
        "groups": len(distributed_c10d._world.pg_map),
        "objects": len(ours),
        "entries": _entries(ours),
        "tensors": len(tensors),
        "tensor MB": sum(storages.values()) / 2**20,
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


def _entries(ours: Sequence[object]) -> int:
    """Counts what is in containers and caches of db-SP's modules, of classes in them, and of objects."""
    holders = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("dbsp_")]
    holders += [vars(value) for holder in holders for value in holder.values() if isinstance(value, type)]
    holders += [vars(one) for one in ours if hasattr(one, "__dict__")]
    held = (getattr(value, "__func__", value) for holder in holders for value in list(holder.values()))
    once = {id(value): value for value in held}.values()
    found = sum(len(value) for value in once if isinstance(value, (Mapping, Set, MutableSequence)))
    return found + sum(one.cache_info().currsize for one in once if isinstance(one, functools._lru_cache_wrapper))


def slope(series: Series, name: str) -> float:
    """Returns the growth in each case: the slope of a line through the second half, by least squares."""
    values = [one[name] for one in series[len(series) // 2 :]]
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0


def counts_that_grow(series: Series) -> list[str]:
    """Returns the counts of which every value in the last third of the second half is above all in its first third.

    Counts that go up and down for good are not among them.
    """
    half = series[len(series) // 2 :]
    third = len(half) // 3
    found = []
    for name in half[0]:
        first, last = ([one[name] for one in part] for part in (half[:third], half[-third:]))
        if name not in (RESIDENT, IN_USE) and min(last) > max(first):
            found.append(f"{name}: {max(first):g} at most, then {min(last):g} at least")
    return found
