"""Census of a process: memory, descriptors, threads, groups, and entries of db-SP's own caches; and what grows."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch.distributed import distributed_c10d

RESIDENT, IN_USE = "MB", "MB in use"
_CONTAINERS = (Mapping, list, set, deque, WeakKeyDictionary, WeakValueDictionary, WeakSet)


def freeze() -> None:
    """Leaves out of garbage collection what there is before anything is counted."""
    gc.collect()
    gc.freeze()


def census() -> dict[str, float]:
    """Counts this process, once garbage has been collected and free memory given back to the system.

    MB: anonymous memory that is resident: pages of libraries, which the system maps in and drops, are not in it
    MB in use: of what `malloc` gave out, not given back yet: other than the former, it knows no holes
    objects: of db-SP's classes;  entries: of containers in them and in db-SP's modules, and of its `lru_cache`s
    tensors, tensor MB: alive;  everything: objects that Python's garbage collector knows
    What was there at `freeze` is not counted among objects and tensors.
    """
    gc.collect()
    gc.collect()  # what finalizers of the first made free
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    alive = gc.get_objects()
    ours = [one for one in alive if _is_ours(type(one).__module__)]
    tensors = [one for one in alive if issubclass(type(one), torch.Tensor)]
    modules = [vars(module) for name, module in list(sys.modules.items()) if _is_ours(name)]
    held = [value for holder in (*modules, *map(_attributes, ours)) for value in holder.values()]
    classes = [value for holder in modules for value in holder.values() if isinstance(value, type)]
    caches = {one for holder in (*modules, *map(vars, classes)) for one in map(_cache, holder.values()) if one}
    return {
        RESIDENT: _anonymous_bytes() / 2**20,
        IN_USE: _bytes_in_use() / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(distributed_c10d._world.pg_map),
        "objects": len(ours),
        "entries": sum(map(len, _containers(held))) + sum(one.cache_info().currsize for one in caches),
        "tensors": len(tensors),
        "tensor MB": sum(_storages(tensors).values()) / 2**20,
        "everything": len(alive),
    }


def _is_ours(module: Any) -> bool:
    return isinstance(module, str) and module.startswith("dbsp_")


def _attributes(one: Any) -> Mapping[str, Any]:
    return one.__dict__ if not isinstance(one, type) and hasattr(one, "__dict__") else {}


def _cache(value: Any) -> Any:
    """Returns a function's `lru_cache`, also a static or class method's; None where it has none."""
    function = getattr(value, "__func__", value)
    return function if isinstance(function, functools._lru_cache_wrapper) else None


def _containers(values: Iterable[Any]) -> list[Any]:
    """Returns each container once."""
    return list({id(value): value for value in values if isinstance(value, _CONTAINERS)}.values())


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address: several tensors may share a storage."""
    found = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of tensors that have none
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kilobytes) * 1024


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`: ten numbers, of which `hblkhd` is the fifth and `uordblks` the eighth."""

    _fields_ = [("numbers", ctypes.c_size_t * 10)]


def _bytes_in_use() -> int:
    """Returns what `malloc` gave out; what is resident, where the C library cannot say: glibc can from 2.33 on."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return _anonymous_bytes()
    mallinfo.restype = _MallInfo2
    numbers = mallinfo().numbers
    return int(numbers[4] + numbers[7])


def _second_half(series: Sequence[Mapping[str, float]]) -> Sequence[Mapping[str, float]]:
    """Returns the part after the warm-up."""
    return series[len(series) // 2 :]


def slope(series: Sequence[Mapping[str, float]], name: str) -> float:
    """Returns the growth in each case: the slope of a line through the second half, by least squares."""
    values = [one[name] for one in _second_half(series)]
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) if len(values) > 1 else 0.0


def counts_that_grow(series: Sequence[Mapping[str, float]]) -> list[str]:
    """Returns the counts of which every value in the last third of the second half is above all in its first third.

    Counts that go up and down for good are not among them.
    """
    half = _second_half(series)
    third = len(half) // 3
    found = []
    for name in half[0]:
        first, last = ([one[name] for one in part] for part in (half[:third], half[-third:]))
        if name not in (RESIDENT, IN_USE) and min(last) > max(first):
            found.append(f"{name}: {max(first):g} at most, then {min(last):g} at least")
    return found
