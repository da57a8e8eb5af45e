"""Operators that make tensors on simulated devices, registered with torch for all threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.gpu_node.faults import recorded
from tests.gpu_node.tensors import DeviceTensor, copy, index_of, on_device, on_host

aten = torch.ops.aten


def _empty(
    size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    memory_format: Any = None,
) -> DeviceTensor:  # fmt: skip
    values = torch.empty(size, dtype=dtype or torch.get_default_dtype(), device="cpu")
    if memory_format is not None and memory_format is not torch.preserve_format:
        values = values.contiguous(memory_format=memory_format)
    return DeviceTensor(_unset(values), index_of(torch.device(device)))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> DeviceTensor:
    values = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype(), device="cpu")
    return DeviceTensor(_unset(values), index_of(torch.device(device)))


_FACTORIES = (
    *("arange", "arange.start", "arange.start_step", "eye", "eye.m", "fft_fftfreq", "fft_rfftfreq", "linspace"),
    *("randperm", "tril_indices"),
)
"""Operators that would make an empty tensor on a device and resize it."""


def _factory(name: str) -> Callable[..., DeviceTensor]:
    packet, _, overload = name.partition(".")
    function = getattr(getattr(aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> DeviceTensor:
        device = index_of(torch.device(kwargs["device"]))
        recorded.operator(packet)
        return on_device(function(*args, **on_host(kwargs)), device)

    return make


def _unset(values: torch.Tensor) -> torch.Tensor:
    """Fills new memory with what shows that nobody wrote it."""
    if values.dtype.is_floating_point and values.itemsize > 1:
        return values.fill_(float("nan"))
    return values


def register() -> torch.library.Library:
    """Registers what makes tensors on devices. It holds for all threads as long as the returned object lives."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    for name in _FACTORIES:
        library.impl(name, _factory(name))
    library.impl("copy_", lambda to, source, non_blocking=False: copy(None, (to, source, non_blocking), {}))
    return library
