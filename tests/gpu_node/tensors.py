"""Tensors that say cuda:N, hold CPU values, and reject to be mixed up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_node import streams
from tests.gpu_node.faults import DeviceFault, recorded
from tests.gpu_node.streams import Memory

aten = torch.ops.aten
torch_data: Any = torch.Tensor.data
"""torch's own descriptor."""
_WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "item", "allclose", "histogramdd"),
}
"""Operators whose result's value or size the host needs."""
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
_COMPUTES_NOTHING = {
    *("alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh"),
    *("new_empty", "new_empty_strided", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "t"),
    *("transpose", "unbind", "unsqueeze", "view", "_reshape_alias", "_unsafe_view", "unfold", "view_as_real"),
    *("view_as_complex", "record_stream", "set_", "resize_", "diagonal", "_conj"),
}


class PeakBytes:
    """Bytes that are allocated on each device, and the most that there were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: dict[int, int] = {}
        self.most: dict[int, int] = {}

    def change(self, device: int, by: int) -> None:
        with self._lock:
            self.now[device] = self.now.get(device, 0) + by
            self.most[device] = max(self.most.get(device, 0), self.now[device])

    def reset(self, device: int) -> None:
        with self._lock:
            self.most[device] = self.now.get(device, 0)


peak_bytes = PeakBytes()
generators: dict[int, torch.Generator] = {}
"""Each device's default generator of random numbers."""
_RANDOM = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "randperm", "native_dropout", "multinomial"}


class DeviceTensor(torch.Tensor):
    """A tensor on a simulated device.

    Attributes:
        inner: The CPU tensor with its values.
        memory: The allocation, which views share.
    """

    inner: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        values: torch.Tensor,
        device: int | None = None,
        memory: Memory | None = None,
        *,
        requires_grad: bool = False,
    ) -> Any:
        if device is None:  # accelerate makes a parameter anew by calling its class
            return torch.nn.Parameter(values, requires_grad)
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, layout=values.layout, device=torch.device("cuda", device),
        )  # fmt: skip
        made.inner, made.memory = values, memory or _allocated(values, device)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner}, {self.device})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        _host_wait("tolist", self.device.index)
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def record_stream(self, stream: streams.Stream) -> None:
        """Keeps the memory from being used again before the stream is done: nothing is used again here."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {})


def inner(value: Any) -> Any:
    """Returns a device tensor's values, and anything else as it is."""
    return value.inner if isinstance(value, DeviceTensor) else value


def on_device(values: torch.Tensor, device: int) -> DeviceTensor:
    """Returns a new tensor on a device, written by its current stream."""
    made = DeviceTensor(values, device)
    streams.submit(device, [], [made.memory], "a copy to the device")
    return made


def set_data(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Sets `tensor.data`, which offloading does; from the host to a device or back, the tensor's class is another."""
    if isinstance(tensor, DeviceTensor) or isinstance(values, DeviceTensor):
        fresh = values.detach()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        torch.utils.swap_tensors(tensor, torch.nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh)
    else:
        torch_data.__set__(tensor, values)


def require_taken(what: str, tensors: list[torch.Tensor], *, over_nccl: bool, over_gloo: bool) -> None:
    """Raises DeviceFault for a tensor that a group does not take: NCCL takes the current device's, gloo the host's."""
    for tensor in tensors:
        if not isinstance(tensor, DeviceTensor):
            if not over_gloo:
                raise DeviceFault(f"{what}: CPU tensor given to NCCL")
        elif not over_nccl:
            raise DeviceFault(f"{what}: {tensor.device} tensor given to gloo, which copies it through the host")
        elif tensor.device.index != (current := streams.current_device()):
            raise DeviceFault(f"{what}: tensor on {tensor.device} given to NCCL while the current device is {current}")


def _allocated(values: torch.Tensor, device: int) -> Memory:
    streams.require_own(device, "an allocation")
    memory = Memory(device, values.untyped_storage().nbytes())
    peak_bytes.change(device, memory.bytes)
    weakref.finalize(memory, peak_bytes.change, device, -memory.bytes)
    return memory


def _host_wait(what: str, device: int) -> None:
    recorded.host_wait(what)
    streams.host_waits_for_current_stream(device)


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator on the values, after checking what CUDA would."""
    name = func._schema.name.split("::")[1]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(func, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
    device = _device_of(name, func, args, kwargs, leaves, tensors)
    asked = kwargs.get("device")
    to_host = asked is not None and torch.device(asked).type != "cuda"
    out_device = device if asked is None or to_host else index_of(torch.device(asked))
    if name in _WAITS or _reads_booleans(name, args) or (name == "repeat_interleave" and _sizes_unknown(args, kwargs)):
        _host_wait(name, device)
    takes_generator = any(argument.name == "generator" for argument in func._schema.arguments)
    if name in _RANDOM and kwargs.get("generator") is None and takes_generator:
        kwargs = {**kwargs, "generator": generators[device]}
    result = func(*tree_map(inner, args), **tree_map(inner, on_host(kwargs)))
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    written = _written(func, args, kwargs)
    for tensor in written:
        if tensor.shape != tensor.inner.shape:
            raise NotImplementedError(f"{name} resizes a tensor on a device")
    made = _Wrapping(tensors, None if to_host else out_device)
    result = tree_map(made, result)
    if name not in _COMPUTES_NOTHING and (outputs or written):
        recorded.operator(name)
        memories, changed = [tensor.memory for tensor in (*written, *made.fresh)], set(map(id, written))
        streams.submit(device, [t.memory for t in tensors if id(t) not in changed], memories, name)
    return result


class _Wrapping:
    """Wraps an operator's results: in place, views, or new."""

    def __init__(self, tensors: list[DeviceTensor], device: int | None) -> None:
        self._known = {id(tensor.inner): tensor for tensor in tensors}
        self._storages = {tensor.inner.untyped_storage()._cdata: tensor.memory for tensor in tensors}
        self._device = device
        self.fresh: list[DeviceTensor] = []

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or isinstance(value, DeviceTensor) or self._device is None:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        memory = self._storages.get(value.untyped_storage()._cdata)
        made = DeviceTensor(value, self._device if memory is None else memory.device, memory)
        if memory is None:
            self.fresh.append(made)
        return made


def _device_of(name: str, func: Any, args: Any, kwargs: Any, leaves: list[Any], tensors: list[DeviceTensor]) -> int:
    """Returns the device of an operator's tensors. Raises DeviceFault where they are on several, or on the host."""
    devices = {tensor.device.index for tensor in tensors}
    if len(devices) > 1:
        raise DeviceFault(f"Expected all tensors to be on the same device, but {name} got {sorted(devices)}")
    if not devices:
        return streams.current_device()
    from_host = [t for t in leaves if isinstance(t, torch.Tensor) and not isinstance(t, DeviceTensor) and t.dim()]
    if from_host and name in _INDEXING and isinstance(args[0], DeviceTensor):
        _host_wait(f"{name} with host indices", next(iter(devices)))
    elif from_host:
        shapes = [tuple(tensor.shape) for tensor in from_host]
        raise DeviceFault(
            f"Expected all tensors to be on the same device, but {name} got cuda:{devices.pop()} and host tensors of "
            f"shapes {shapes}"
        )
    return devices.pop()


def index_of(device: torch.device) -> int:
    """Returns a device's index, or the current device's."""
    return streams.current_device() if device.index is None else device.index


def on_host(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for the operator on values."""
    given = dict(kwargs)
    if given.get("device") is not None:
        given["device"] = torch.device("cpu")
    if given.get("pin_memory") is not None:
        given["pin_memory"] = False
    return given


def _reads_booleans(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether an index is a mask, whose number of entries the host needs."""
    if name not in _INDEXING:
        return False
    return any(isinstance(t, torch.Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def _sizes_unknown(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    repeats = args[1] if len(args) > 1 else args[0]
    return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[DeviceTensor]:
    """Returns the arguments that the operator writes."""
    written: list[DeviceTensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, DeviceTensor)]
    return written


def copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs copy_: within a device, between devices, and between device and host."""
    to, source = args[0], args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if not isinstance(source, DeviceTensor):
        to.inner.copy_(source)
        streams.submit(to.device.index, [], [to.memory], "copy_")
        _from_host(source, to.device.index, non_blocking)
    elif not isinstance(to, DeviceTensor):
        _to_host(to, source, non_blocking)
    else:
        to.inner.copy_(source.inner)
        recorded.operator("copy_")
        if to.device == source.device:
            streams.submit(to.device.index, [source.memory], [to.memory], "copy_")
        else:
            streams.submit(to.device.index, [], [to.memory], "copy_")
    return to


def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs _to_copy: `Tensor.to` with another device or dtype."""
    source, asked = args[0], kwargs.get("device")
    device = source.device if asked is None else torch.device(asked)
    options = {name: kwargs[name] for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
    non_blocking = bool(kwargs.get("non_blocking", False))
    if device.type == "cuda":
        index = index_of(device)
        if not isinstance(source, DeviceTensor):
            made = on_device(aten._to_copy(source, **options), index)
            _from_host(source, index, non_blocking)
            return made
        made = DeviceTensor(aten._to_copy(source.inner, **options), index)
        recorded.operator("_to_copy")
        same = [source.memory] if index == source.device.index else []
        streams.submit(index, same, [made.memory], "_to_copy")
        return made
    found = aten._to_copy(source.inner, device=device, **options)
    if device.type != "cpu":
        return found
    if non_blocking:  # torch takes pinned memory for it
        found = torch.empty_like(found, pin_memory=True)
    _to_host(found, source, non_blocking)
    return found


def _from_host(source: torch.Tensor, device: int, non_blocking: bool) -> None:
    if source.dim() == 0 and source.numel() == 1 and source.layout == torch.strided and not source.is_pinned():
        _host_wait("copy of a host scalar", device)
    elif source.numel() and not (non_blocking and source.is_pinned()):
        _host_wait("copy from pageable memory" if not source.is_pinned() else "copy from the host", device)


def _to_host(to: torch.Tensor, source: DeviceTensor, non_blocking: bool) -> None:
    """Copies to the host: at once if the host waits, else not before it has waited for the stream."""
    index = source.device.index
    if not source.numel():
        return
    if not (non_blocking and to.is_pinned()):
        _host_wait("copy to the host", index)
        to.copy_(source.inner)
        return
    number = streams.submit(index, [source.memory], [], "copy_")
    values = source.inner.clone()

    to.copy_(torch.full_like(values, 0x7F))  # what a host that does not wait reads
    streams.later(index, number, lambda: to.copy_(values))


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """CUDA's fused attentions, by the CPU's: output, log-sum-exp, and the rest of what they return."""
    q, k, v = args[:3]
    _device_of(func._schema.name, func, args, kwargs, [q, k, v], [q, k, v])
    scale = kwargs.get("scale")
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.inner.to(wide) @ k.inner.to(wide).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    lse = scores.logsumexp(dim=-1)
    out = on_device(((scores - lse[..., None]).exp() @ v.inner.to(wide)).to(q.dtype), q.device.index)
    recorded.operator(func._schema.name.split("::")[1])
    lse_there = on_device(lse.to(torch.float32), q.device.index)
    nothing = torch.empty(0)
    rest = [nothing if str(one.type) == "Tensor" else 0 for one in func._schema.returns[2:]]
    return (out, lse_there, *rest)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "copy_": copy,
    "_to_copy": _to_copy,
    "record_stream": lambda *_: None,  # see `DeviceTensor.record_stream`
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
}
