"""`torch.cuda` over simulated devices: what the product and the libraries under it call of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
import triton.runtime.interpreter as interpreter

from tests.gpu_node import factories, streams, tensors
from tests.gpu_node.faults import recorded
from tests.gpu_node.streams import Event, Stream, current_device, current_stream, on_stream, set_device

MEMORY_BYTES = 80 << 30
NAMES = {80: "simulated A100", 90: "simulated H100", 120: "simulated RTX PRO 6000"}
_arch = 90
_kept: list[Any] = []


def architecture(arch: int | None = None) -> int:
    """Returns the compute capability of all devices, as 90; sets it first if one is given."""
    global _arch
    _arch = arch or _arch
    return _arch


class Device:
    """Replaces torch.cuda.device: the current device within a block."""

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else device if isinstance(device, int) else _index(device)

    def __enter__(self) -> None:
        self.before = current_device()
        if self.idx >= 0:
            set_device(self.idx)

    def __exit__(self, *error: Any) -> None:
        streams._runtime.set_device(self.before)


class Generator(torch.Generator):
    """A CPU generator that says it is a device's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        asked = torch.device(device)
        self._of = torch.device("cuda", _index(asked)) if asked.type == "cuda" else asked

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._of


def activate(runtime: Any, devices: int) -> None:
    """Lets this process have `devices` simulated devices, for good."""
    streams.use_runtime(runtime)
    cuda = torch.cuda
    generators = {index: torch.Generator() for index in range(devices)}
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: devices,
        "current_device": current_device,
        "set_device": set_device,
        "device": Device,
        "get_device_capability": lambda device=None: divmod(_arch, 10),
        "get_device_name": lambda device=None: NAMES.get(_arch, f"simulated sm{_arch}"),
        "get_device_properties": lambda device=None: _properties(),
        "get_arch_list": lambda: [f"sm_{_arch}"],
        "mem_get_info": lambda device=None: (MEMORY_BYTES - _allocated(device), MEMORY_BYTES),
        "memory_allocated": lambda device=None: _allocated(device),
        "memory_reserved": lambda device=None: _allocated(device),
        "max_memory_allocated": lambda device=None: tensors.peak_bytes.most.get(_index(device), 0),
        "max_memory_reserved": lambda device=None: tensors.peak_bytes.most.get(_index(device), 0),
        "reset_peak_memory_stats": lambda device=None: tensors.peak_bytes.reset(_index(device)),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "synchronize": _synchronize,
        "Stream": Stream,
        "Event": Event,
        "current_stream": current_stream,
        "default_stream": lambda device=None: Stream(_index(device), number=0),
        "stream": on_stream,
        "set_stream": lambda stream: streams._runtime.set_stream(stream.device.index, stream.stream_id),
        "is_bf16_supported": lambda *_: True,
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda seed: generators[current_device()].manual_seed(seed),
        "manual_seed_all": lambda seed: [one.manual_seed(seed) for one in generators.values()] and None,
        "get_rng_state": lambda device="cuda": generators[_index(device)].get_state(),
        "set_rng_state": lambda state, device="cuda": generators[_index(device)].set_state(state),
        "default_generators": tuple(generators.values()),
        "_sleep": lambda cycles: None,
    }
    for name, value in functions.items():
        setattr(cuda, name, value)
    for name in ("cudnn", "flash", "mem_efficient"):
        enabled = getattr(torch.backends.cuda, f"{name}_sdp_enabled")
        setattr(torch._C, f"_can_use_{name}_attention", lambda inputs, debug, enabled=enabled: enabled())
    torch.backends.cudnn.version = lambda: 91900  # type: ignore[assignment]
    cuda.random.get_rng_state, cuda.random.set_rng_state = functions["get_rng_state"], functions["set_rng_state"]
    torch.Generator = Generator  # type: ignore[misc]
    torch.version.cuda = "13.0"
    torch.__future__.set_swap_module_params_on_conversion(True)  # so that Module.to keeps the subclass
    torch.Tensor.data = property(tensors.torch_data.__get__, tensors.set_data)  # type: ignore[assignment, method-assign]
    tensors.generators.update(generators)
    from tests.gpu_node import launches  # which asks for the architecture

    interpreter.GridExecutor.__call__ = launches.checked(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.rewrite = launches.one_at_a_time(interpreter.InterpretedFunction.rewrite)
    threading.Thread.__init__ = _inherits_its_device(threading.Thread.__init__)  # type: ignore[method-assign]
    _kept.append(factories.register())


def _properties() -> SimpleNamespace:
    major, minor = divmod(_arch, 10)
    return SimpleNamespace(
        name=NAMES.get(_arch, f"simulated sm{_arch}"), major=major, minor=minor, uuid="0", gcnArchName="",
        total_memory=MEMORY_BYTES, multi_processor_count=4, warp_size=32, L2_cache_size=50 << 20,
        max_threads_per_multi_processor=2048, shared_memory_per_block=48 << 10,
    )  # fmt: skip


def _index(device: Any) -> int:
    if device is None:
        return current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return current_device() if index is None or index < 0 else index


def _allocated(device: Any) -> int:
    return tensors.peak_bytes.now.get(_index(device), 0)


def _synchronize(device: Any = None) -> None:
    recorded.host_wait("synchronize")
    streams.host_waits_for_device(_index(device))


def _inherits_its_device(init: Any) -> Any:
    """Wraps a thread's making: it belongs to the rank that made it. Its current device is cuda:0, as CUDA has it."""

    def made(self: threading.Thread, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        own, run = streams.own_device(), self.run

        def on_the_ranks_device() -> None:
            with streams.owning(own):
                run()

        self.run = on_the_ranks_device  # type: ignore[method-assign]

    return made
