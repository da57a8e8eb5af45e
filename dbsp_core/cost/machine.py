"""Constants of a machine for the latency model, with units and sources."""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from dbsp_core.utils.errors import UserError, fingerprint_of, in_short, require_value
from dbsp_core.utils.files import require_file, user_path, write_atomically
from dbsp_core.utils.schema import build
from dbsp_core.utils.yaml_file import read_settings, shipped_configs
from dbsp_kernels import KERNELS
from dbsp_kernels.triton.tiles import slots_of

SHIPPED = shipped_configs() / "hardware"
RECORDED = ("versions", "residuals", "date", "notes")
"""Keys of a file that document how it was made."""


@dataclass(frozen=True)
class Constants:
    """Constants of the latency model, per rank: seconds, bytes per second in one direction, FLOP per second."""

    flops_per_s: float  # Rate of the two products of attention on active blocks
    score_s: float  # Time per score of an active block on top of the products (softmax)
    row_s: float  # Time per row and chunk
    launch_s: float  # Time to launch the kernel, per chunk
    call_s: float  # Time of other launches and bookkeeping, per attention
    pack_bytes_per_s: float  # Rate of packing and unpacking exchange buffers
    merge_bytes_per_s: float  # Memory rate of merging two chunks' outputs
    exchange_latency_s: float  # One all-to-all within a node
    exchange_bytes_per_s: float
    p2p_latency_s: float  # A further chunk of keys within a node
    p2p_bytes_per_s: float
    overlap: float  # Fraction of the shorter of compute and P2P hidden behind the longer, 0 to 1
    linear_flops_per_s: float  # Rate of a transformer except self-attention's scores
    serial_s: float = 0.0  # Time per video that is not parallel (text encoder, VAE)
    network_latency_s: float | None = None  # Between nodes, in exchanges and chunks. None: unknown
    network_bytes_per_s: float | None = None  # A rank's share of its node's adapters
    predict_s: float | None = None  # Mask prediction, per token and head of a rank's share. None: unknown
    dense_flops_per_s: float | None = None  # Rate of the fastest dense attention at head size 128. None: unknown

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and name.endswith("_per_s"):
                require_value(self, name, value > 0, "must be positive", "hardware constant ")
            elif value is not None:
                require_value(self, name, value >= 0, "must not be negative", "hardware constant ")
        require_value(self, "overlap", self.overlap <= 1, "must lie between 0 and 1", "hardware constant ")
        if (self.network_latency_s is None) != (self.network_bytes_per_s is None):
            raise UserError("network_latency_s and network_bytes_per_s go together; give both or neither")


@dataclass(frozen=True)
class KernelConstants:
    """Another kernel's values of a machine's `Constants`; None: equal."""

    source: str  # Origin of these values, as in `Hardware.sources`
    flops_per_s: float | None = None
    score_s: float | None = None
    launch_s: float | None = None
    flops_by_blocks: Mapping[str, float] = field(default_factory=dict)  # See `Hardware`
    head_dim: int | None = None  # Head size of the measurement beside dense attention. None: not measured


@dataclass(frozen=True)
class Hardware:
    """A machine in the latency model."""

    name: str
    device: str  # Device, as named by `device_class`
    dtype: str  # Dtype of q, k and v for the constants
    constants: Constants  # The block-sparse kernels' in `dtype`
    sources: Mapping[str, str]  # Per constant: measured, fitted, published, derived (from another's) or assumed
    gpus_per_node: int | None = None  # None: unknown. Traffic between nodes uses `network_*`
    kernels: Mapping[str, KernelConstants] = field(default_factory=dict)  # Differing constants by kernel
    exact_kernels: tuple[str, ...] = ()  # Exact on this device, fastest first; empty: not measured
    flops_by_blocks: Mapping[str, float] = field(default_factory=dict)  # Rates on blocks of QUERIESxKEYS tokens
    multiprocessors: int | None = None  # Of the GPU. None: unknown
    capability: int | None = None  # Compute capability, 90 for Hopper
    whole_rows: bool = False  # True if its kernel does not cut long rows; see `with_kernel`

    def __post_init__(self) -> None:
        for name, unit in (("gpus_per_node", "GPUs"), ("multiprocessors", "multiprocessors"), ("capability", "90")):
            value = getattr(self, name)
            require_value(self, name, value is None or value >= 1, f"must be a number of {unit}, at least 1")

    @property
    def measured(self) -> bool:
        """True if any constant was measured."""
        return "measured" in self.sources.values()

    @property
    def fingerprint(self) -> int:
        """63-bit hash of the constants, for comparing ranks."""
        rates = sorted(self.flops_by_blocks.items())
        sizes = [(name, kernel.head_dim) for name, kernel in sorted(self.kernels.items())]
        return fingerprint_of((self.constants, rates, sizes, self.multiprocessors, self.capability, self.whole_rows))

    def with_kernel(self, name: str) -> Hardware:
        """Returns this machine with a kernel's constants, or unchanged if they are unknown.

        Kernel "auto" is the fastest exact kernel of `dbsp bench`, else "triton".
        """
        if name == "auto":
            name = self.exact_kernels[0] if self.exact_kernels else "triton"
        if name in KERNELS and KERNELS[name].slots is None:
            self = replace(self, whole_rows=True)
        if name not in self.kernels:
            return self
        kernel = self.kernels[name]
        names = ("flops_per_s", "score_s", "launch_s")
        changed = {key: getattr(kernel, key) for key in names if getattr(kernel, key) is not None}
        return replace(
            self,
            constants=replace(self.constants, **changed),
            sources={**self.sources, **dict.fromkeys(changed, kernel.source)},
            flops_by_blocks=kernel.flops_by_blocks,
        )

    def with_dense_attention(self) -> Hardware:
        """Returns this machine with the rate of dense attention as its kernel's, or unchanged if unknown."""
        rate = self.constants.dense_flops_per_s
        if rate is None:
            return self
        constants = replace(self.constants, flops_per_s=rate, score_s=0.0, row_s=0.0)
        return replace(self, constants=constants, flops_by_blocks={}, whole_rows=False)

    def row_slots(self, block_q: int, block_k: int, head_dim: int) -> int | None:
        """Returns how many rows a GPU computes at a time with kernel `triton`, or None if unknown."""
        if self.multiprocessors is None or self.capability is None:
            return None
        dtype = getattr(torch, self.dtype)
        return slots_of(self.multiprocessors, self.capability, (block_q, block_k), head_dim, dtype)

    def at_blocks(self, block_q: int, block_k: int) -> Constants:
        """Returns the constants with the kernel's rate at these block sizes."""
        rate = self.flops_by_blocks.get(f"{block_q}x{block_k}")
        return self.constants if rate is None else replace(self.constants, flops_per_s=rate)

    def break_even(self, block_q: int, block_k: int, head_dim: int, tokens: int) -> float | None:
        """Returns the density above which dense attention is faster than predicting a mask and sparse attention.

        Per pair of tokens of one head, dense attention takes 4·D / dense rate seconds, sparse attention density · (4·D
        / rate of the kernel + score_s), and prediction predict_s / tokens. The number of ranks cancels. None if the
        rate of dense attention is unknown.
        """
        known = self.at_blocks(block_q, block_k)
        if known.dense_flops_per_s is None:
            return None
        dense_s = 4 * head_dim / known.dense_flops_per_s
        active_s = 4 * head_dim / known.flops_per_s + known.score_s
        return (dense_s - (known.predict_s or 0.0) / tokens) / active_s


def load_hardware(source: str | os.PathLike[str]) -> Hardware:
    """Reads a shipped machine by name, such as "h800", or a YAML file of `dbsp bench`.

    Raises UserError for an unknown name or key, a missing key or an invalid value.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
    path = shipped.get(os.fspath(source)) or user_path(source)
    again = "measure again with: torchrun --nproc-per-node GPUS -m dbsp_cli bench MODEL"
    advice = f"use {', '.join(shipped) or 'the path of a YAML file'}, or {again}"
    if path.parent == Path() and not os.path.lexists(path):
        raise UserError(f"no hardware {in_short(os.fspath(source))}; {advice}")
    require_file(path, "hardware file", advice)
    return _read(path, path.stat().st_mtime_ns)


@functools.cache
def _read(path: Path, _changed_ns: int) -> Hardware:
    """Reads a file once for all sessions (tens of milliseconds)."""
    settings = read_settings(path, "hardware file")
    values = {key: value for key, value in settings.values.items() if key not in RECORDED}
    with settings.located():
        hardware: Hardware = build(Hardware, values, "")
    return hardware


def save_hardware(path: str | os.PathLike[str], hardware: Hardware, record: Mapping[str, Any] | None = None) -> None:
    """Writes a YAML file for `load_hardware` atomically; `record` documents how it was made."""

    def given(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in pairs if value not in (None, {}, ())}

    values = asdict(hardware, dict_factory=given) | dict(record or {})
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


def device_class(device: torch.device | str) -> str:
    """Returns the model name of a device ("cuda": the current GPU), without host name or serial number."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, one core per rank"


@functools.cache
def _cpu_model() -> str:
    try:
        model = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        model = None
    return model[1].strip() if model else platform.processor() or platform.machine()


def measured_file(device: str) -> Path:
    """Returns the file in which `dbsp bench` stores the constants of this machine's "cuda" or "cpu" device.

    The folder, `$XDG_CACHE_HOME/dbsp/hardware` or ~/.cache/dbsp/hardware, may be shared with other machines.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = re.sub(r"[^a-z0-9]+", "-", device_class(device).lower()).strip("-")
    return cache / "dbsp" / "hardware" / f"{name}.yaml"


def hardware_for(machine: str | None, device: str, kernel: str) -> Hardware | None:
    """Returns the constants for predicting costs on a "cuda" or "cpu" device, or None.

    `machine` is a name or file from the configuration. None: this machine's `measured_file` if it exists, else no
    constants; other machines' constants are never assumed.
    """
    file = machine if machine is not None else measured_file(device)
    return load_hardware(file).with_kernel(kernel) if machine is not None or os.path.isfile(file) else None


def rates_of(machine: str | None, device: torch.device, kernel: str) -> Hardware | None:
    """Returns `hardware_for`, or else the shipped machine with exactly this device, or None."""
    hardware = hardware_for(machine, device.type, kernel)
    if hardware is not None or device.type != "cuda":
        return hardware
    same = shipped_hardware(device)
    return None if same is None else same.with_kernel(kernel)


def shipped_hardware(device: torch.device) -> Hardware | None:
    """Returns the shipped machine with exactly this device, or None."""
    shipped = (load_hardware(path) for path in sorted(SHIPPED.glob("*.yaml")))
    return next((machine for machine in shipped if machine.device == device_class(device)), None)


def kernel_order(kernel: str, machine: str | None, device: torch.device) -> str:
    """Returns the kernels for `choose_kernel`: for "auto", those exact on this device, fastest first, then "auto".

    Other names are returned unchanged, also "auto" if $DBSP_KERNEL is set. Measurements of another device are ignored.
    """
    if kernel != "auto" or os.environ.get("DBSP_KERNEL"):
        return kernel
    hardware = hardware_for(machine, device.type, kernel)
    if hardware is None or not hardware.exact_kernels or hardware.device != device_class(device):
        return kernel
    return ",".join([*(name for name in hardware.exact_kernels if name in KERNELS), kernel])


def cost_basis(hardware: Hardware | None) -> str:
    """Returns the name of the cost model, for the log."""
    if hardware is None:
        return "rules without constants; `dbsp bench MODEL` on all ranks measures this machine"
    exchanges = hardware.sources["exchange_bytes_per_s"]
    how = f"measured, exchanges {exchanges}" if hardware.measured else "modelled, not measured"
    return f"constants of {hardware.name} ({how})"
