"""Triton launches on simulated devices: checked as CUDA checks them, then run in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.gpu_node import cuda_api, streams
from tests.gpu_node.faults import DeviceFault, recorded
from tests.gpu_node.tensors import DeviceTensor, inner

MOST_SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""By architecture: shared memory that one program may have (CUDA C++ Programming Guide, technical specifications)."""
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
_LOCK = threading.RLock()  # the interpreter keeps the position in the grid in a global, and Python's parser its depth


def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function of the interpreter that threads must not enter together."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _LOCK:
            return function(*args, **kwargs)

    return call


def checked(launch: Callable[..., None]) -> Callable[..., None]:
    """Wraps `GridExecutor.__call__`."""

    def run(executor: Any, *args: Any, **kwargs: Any) -> None:
        name = executor.fn.__name__
        given = [*args, *kwargs.values()]
        tensors = [t for one in given if (t := _tensor_of(one)) is not None]
        devices = {t.device.index for t in tensors if isinstance(t, DeviceTensor)}
        if not devices:
            with _LOCK:
                return launch(executor, *args, **kwargs)
        if len(devices) > 1:
            raise DeviceFault(f"{name}: tensors on {sorted(devices)}")
        device = devices.pop()
        on_host = [tuple(t.shape) for t in tensors if not isinstance(t, DeviceTensor)]
        if on_host:
            raise DeviceFault(f"{name}: pointer arguments on the host (of shapes {on_host}) next to cuda:{device}")
        if device != streams.current_device():
            raise DeviceFault(
                f"{name}: tensors on cuda:{device}, but the current device is {streams.current_device()}"
            )
        _check_grid(name, executor.grid, kwargs)
        _check_shared_bytes(name, kwargs, tensors[0].itemsize)
        recorded.launch(name, _variant(executor, args, kwargs))
        if "INTERPRET_FP32" in executor.arg_names and any(t.dtype == torch.bfloat16 for t in tensors):
            kwargs = {**kwargs, "INTERPRET_FP32": True}  # the interpreter's products of bfloat16 are wrong
        there = list({id(t.memory): t for t in tensors if isinstance(t, DeviceTensor)}.values())
        with _LOCK, torch.no_grad():
            before = [_bytes(t).clone() for t in there]
            launch(executor, *map(_values, args), **{name: _values(value) for name, value in kwargs.items()})
            written = [not torch.equal(_bytes(t), old) for t, old in zip(there, before, strict=True)]
        reads = [t.memory for t, changed in zip(there, written, strict=True) if not changed]
        writes = [t.memory for t, changed in zip(there, written, strict=True) if changed]
        streams.submit(device, reads, writes, name)
        return None

    return run


def _tensor_of(value: Any) -> torch.Tensor | None:
    if isinstance(value, TensorDescriptor):
        value = value.base
    return value if isinstance(value, torch.Tensor) else None


def _values(value: Any) -> Any:
    if isinstance(value, TensorDescriptor):
        return TensorDescriptor(inner(value.base), value.shape, value.strides, value.block_shape, value.padding)
    return inner(value)


def _bytes(tensor: DeviceTensor) -> torch.Tensor:
    """Returns all bytes of a tensor's allocation: nothing else says what a kernel writes."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.inner.untyped_storage())


def _check_grid(name: str, grid: Any, kwargs: dict[str, Any]) -> None:
    sizes = grid(kwargs) if callable(grid) else grid
    for size, most in zip(sizes, _MOST_PROGRAMS, strict=False):
        if not 1 <= size <= most:
            raise DeviceFault(f"{name}: grid {tuple(sizes)}, each of which must lie between 1 and {_MOST_PROGRAMS}")


def _check_shared_bytes(name: str, kwargs: dict[str, Any], itemsize: int) -> None:
    """Rejects an attention kernel whose tiles may not fit: its queries, and the keys and values in flight.

    A bound, not the compiler's count: Hopper's pipeline holds two stages less than it is asked for, others one less
    (`shared_bytes` of `python -m scripts.checks.machine_code --json` lies below it for every kernel).
    """
    if not {"TILE_Q", "TILE_K", "TILE_D", "STAGES"} <= kwargs.keys():
        return
    arch = cuda_api.architecture()
    in_flight = max(1, kwargs["STAGES"] - (2 if 90 <= arch < 120 else 1))
    needed = (kwargs["TILE_Q"] + 2 * in_flight * kwargs["TILE_K"]) * kwargs["TILE_D"] * itemsize
    if needed > MOST_SHARED_BYTES[arch]:
        raise DeviceFault(f"{name}: {needed} bytes of shared memory, and sm{arch} has {MOST_SHARED_BYTES[arch]}")


def _variant(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """Returns what Triton would compile a variant for, as far as the values of arguments decide it."""
    kernel = executor.fn.__globals__.get(executor.fn.__name__)
    unspecialized = getattr(kernel, "kwargs", {}).get("do_not_specialize") or ()  # names or positions
    free = {executor.arg_names[one] if isinstance(one, int) else one for one in unspecialized}
    given = [*zip(executor.arg_names, args, strict=False), *sorted(kwargs.items())]
    return tuple((name, _type_of(value) if name in free else _specialised(value)) for name, value in given)


def _type_of(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype
    return None if value is None else ("int", value >= 2**31)  # None is a constant of the variant


def _specialised(value: Any) -> object:
    if isinstance(value, TensorDescriptor):
        return "descriptor", value.base.dtype, tuple(value.block_shape)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__ if isinstance(value, float) else value
    return "1" if value == 1 else ("int", value % 16 == 0, value >= 2**31)
