"""What the latency model knows of a machine: constants with their units, and where each comes from."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import platform
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
import yaml

from dbsp_core.utils.errors import SettingError, UserError, bad_value, blame_setting, in_short
from dbsp_core.utils.files import require_file, user_path, write_atomically
from dbsp_core.utils.process import installed_version
from dbsp_core.utils.schema import build, convert
from dbsp_core.utils.yaml_file import read_settings, require_known, shipped_configs

__all__ = [
    "RULE",
    "SHIPPED",
    "Constants",
    "Hardware",
    "KernelConstants",
    "cost_basis",
    "device_class",
    "hardware_for",
    "load_hardware",
    "measured_file",
    "save_hardware",
    "software_versions",
    "warn_if_elsewhere",
]


SHIPPED = shipped_configs() / "hardware"
LABELS = ("measured", "fitted", "published", "derived", "assumed")
REDO = "measure again, in a checkout of db-SP, with: python -m scripts.calibrate"


@dataclass(frozen=True)
class Constants:
    """Constants of the latency model, each per rank. Seconds, bytes per second in one direction, FLOP per second.

    Attributes:
        flops_per_s: Rate of the two products of attention on dense blocks.
        score_s: Time for each score of a dense block besides the products (softmax).
        row_s: Time for each row in every chunk.
        launch_s: Time to launch the kernel, once a chunk.
        call_s: Time of launches beside the kernel's and of bookkeeping, once an attention.
        pack_bytes_per_s: Rate of gathering into exchange buffers and placing from them.
        merge_bytes_per_s: Rate of memory read and written in merging two chunks' outputs.
        exchange_latency_s: Latency of one all-to-all within a node; `exchange_bytes_per_s` is its rate.
        p2p_latency_s: Latency of a further chunk of keys within a node; `p2p_bytes_per_s` is its rate.
        network_latency_s: Latency of what crosses nodes in either; `network_bytes_per_s` is the rate, a rank's share
            of its node's adapters. None: not known.
        overlap: Share of the shorter of compute and P2P that hides behind the longer, 0 to 1.
        linear_flops_per_s: Rate of everything in a transformer but self-attention's scores.
        serial_s: Time for each video of what one device does alone (text encoder, VAE).
    """

    flops_per_s: float
    score_s: float
    row_s: float
    launch_s: float
    call_s: float
    pack_bytes_per_s: float
    merge_bytes_per_s: float
    exchange_latency_s: float
    exchange_bytes_per_s: float
    p2p_latency_s: float
    p2p_bytes_per_s: float
    overlap: float
    linear_flops_per_s: float
    serial_s: float = 0.0
    network_latency_s: float | None = None
    network_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None and f.default is None:
                continue
            if math.isnan(value):
                raise _bad_constant(self, f.name, "must be a number")
            if f.name.endswith("_per_s") and not value > 0:
                raise _bad_constant(self, f.name, "must be positive")
            if not value >= 0:
                raise _bad_constant(self, f.name, "must not be negative")
            object.__setattr__(self, f.name, float(value))
        if self.overlap > 1:
            raise _bad_constant(self, "overlap", "must lie between 0 and 1")
        if (self.network_latency_s is None) != (self.network_bytes_per_s is None):
            given = "network_latency_s" if self.network_bytes_per_s is None else "network_bytes_per_s"
            raise SettingError("network_latency_s and network_bytes_per_s go together; give both or neither", (given,))


def _bad_constant(constants: Constants, name: str, complaint: str) -> SettingError:
    return bad_value(constants, name, complaint, "hardware constant ")


NODES = "gpus_per_node"


@dataclass(frozen=True)
class KernelConstants:
    """What another kernel has in place of a machine's `Constants`; None: as there.

    Attributes:
        source: Where these come from, as in `Hardware.sources`.
    """

    source: str
    flops_per_s: float | None = None
    score_s: float | None = None
    launch_s: float | None = None
    call_s: float | None = None

    def __post_init__(self) -> None:
        _require_label(self.source, "a kernel's constants")

    @property
    def given(self) -> dict[str, float]:
        """The constants that differ, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None and name != "source"}


def _require_label(label: object, of: str) -> None:
    if label not in LABELS:
        raise SettingError(f"source {label!r} of {of} is not one of {', '.join(LABELS)}", ("source",))


def _read_kernels(kernels: object, name: str) -> dict[str, KernelConstants]:
    if not isinstance(kernels, Mapping):
        raise UserError(f"{name} must be a mapping of kernels to their constants")
    return {str(key): convert(value, KernelConstants, f"{key} in {name}", str(key)) for key, value in kernels.items()}


def _read_date(date: object, name: str) -> str | None:
    """A date as text: YAML reads one without quotes as a date."""
    return None if date is None else str(date)


@dataclass(frozen=True)
class Hardware:
    """A machine as the latency model sees it.

    Attributes:
        device: Class of the device, as `device_class` names it.
        dtype: Type of q, k and v for which the constants hold.
        sources: One of `LABELS` for each constant; derived: from another machine's by published ratios.
        gpus_per_node: Ranks to a node, whose traffic with other nodes is the `network_*` constants'; None: not known.
        kernels: By a kernel's name (`dbsp_kernels.KERNELS`), what it has in place of `constants`, which are
            the block-sparse kernels' in `dtype`.
        versions: Version of each software measured with; empty where nothing was measured.
        residuals: Relative error (root mean square) of the fit of each part of the model on its own samples.
        date: Day of the measurement, YYYY-MM-DD, or None.
        notes: Where published and fitted constants come from.
    """

    name: str
    device: str
    dtype: str
    constants: Constants
    sources: Mapping[str, str]
    gpus_per_node: int | None = None
    kernels: Mapping[str, KernelConstants] = field(default_factory=dict, metadata={"read": _read_kernels})
    versions: Mapping[str, str] = field(default_factory=dict)
    residuals: Mapping[str, float] = field(default_factory=dict)
    date: str | None = field(default=None, metadata={"read": _read_date})
    notes: str = ""

    def __post_init__(self) -> None:
        names = [f.name for f in fields(Constants)] + [NODES]
        if self.gpus_per_node is not None and (type(self.gpus_per_node) is not int or self.gpus_per_node < 1):
            raise bad_value(self, NODES, "must be a number of GPUs, at least 1")
        with blame_setting("sources"):
            for key, label in self.sources.items():
                require_known(key, names, f"sources of hardware {self.name!r}")
                with blame_setting(key):
                    _require_label(label, key)
        given = {**asdict(self.constants), NODES: self.gpus_per_node}
        unlabelled = [name for name in names if given[name] is not None and name not in self.sources]
        if unlabelled:
            message = f"hardware {self.name!r} does not say where {', '.join(unlabelled)} come from; add sources"
            raise SettingError(message, ("sources",))

    @property
    def measured(self) -> bool:
        """Whether any constant was measured, so that it holds for one machine and one version."""
        return "measured" in self.sources.values()

    @property
    def fingerprint(self) -> int:
        """63 bits that differ between constants, to compare ranks by."""
        digest = hashlib.blake2b(repr(self.constants).encode(), digest_size=8)
        return int.from_bytes(digest.digest(), "big") >> 1

    def with_kernel(self, name: str) -> Hardware:
        """This machine with that kernel's constants, or as it is where none are known of it."""
        if name not in self.kernels:
            return self
        kernel = self.kernels[name]
        labels = dict.fromkeys(kernel.given, kernel.source)
        return replace(self, constants=replace(self.constants, **kernel.given), sources={**self.sources, **labels})


def load_hardware(source: str | os.PathLike[str]) -> Hardware:
    """A shipped machine by its name, for example "h800", or the path of a YAML file that `scripts.calibrate` wrote.

    Raises UserError, naming the fix, for an unknown name or key, a missing key or a value that makes no sense.
    """
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
    path = shipped.get(os.fspath(source)) or user_path(source)
    advice = f"use {', '.join(shipped) or 'the path of a YAML file'}, or {REDO}"
    if path.parent == Path() and not os.path.lexists(path):
        raise UserError(f"no hardware {in_short(os.fspath(source))}; {advice}")
    require_file(path, "hardware file", advice)
    return _read_shipped(path) if path in shipped.values() else _read(path)


def _read(path: Path) -> Hardware:
    settings = read_settings(path, "hardware file")
    try:
        with settings.located():
            hardware: Hardware = build(Hardware, settings.values, "")
    except UserError as error:
        raise UserError(f"{error} (mend the file, or {REDO})") from error
    return hardware


_read_shipped = functools.cache(_read)
"""Each session reads the same file, which takes tens of milliseconds."""


def save_hardware(path: str | os.PathLike[str], hardware: Hardware) -> None:
    """Writes a YAML file that `load_hardware` reads, whole or not at all."""
    values = {key: value for key, value in asdict(hardware).items() if value is not None}
    for given in (values["constants"], *values["kernels"].values()):
        for key in [key for key, value in given.items() if value is None]:
            del given[key]
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


def device_class(device: torch.device | str) -> str:
    """Returns the model of a device, or of the current GPU for "cuda": no host name, nothing of this one copy."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu()}, one core per rank"


@functools.cache
def _cpu() -> str:
    try:
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
    except OSError:
        names = []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def software_versions(kernel: str) -> dict[str, str]:
    """What a measurement depends on: db-SP, torch and the kernel."""
    own = installed_version("dbsp-attention") or "not installed"
    return {"dbsp-attention": own, "torch": str(torch.__version__), "kernel": kernel}


def warn_if_elsewhere(hardware: Hardware, device: torch.device | str, kernel: str) -> list[str]:
    """Warns, and says how to measure again, where constants were measured on another device or with other versions.

    Returns:
        What differs, in words; empty for constants that fit, or of which none was measured.
    """
    if not hardware.measured:
        return []
    here = {"device": device_class(device), **software_versions(kernel)}
    there = {"device": hardware.device, **hardware.versions}
    differences = [
        f"{key} {there.get(key, 'unknown')!r} there, {value!r} here"
        for key, value in here.items()
        if there.get(key) != value
    ]
    if differences:
        warnings.warn(
            f"hardware {hardware.name!r} was measured elsewhere ({'; '.join(differences)}); {REDO}", stacklevel=2
        )
    return differences


RULE = "rules without constants; `python -m scripts.calibrate`, in a checkout, measures this machine"
"""What costs are estimated by if `hardware_for` returns None, in words."""


def measured_file(device: str) -> Path:
    """Returns the file in which `scripts.calibrate` keeps the constants of this machine's "cuda" or "cpu" device.

    Machines with other devices may share the folder: `$XDG_CACHE_HOME/dbsp/hardware`, or ~/.cache/dbsp/hardware.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = re.sub(r"[^a-z0-9]+", "-", device_class(device).lower()).strip("-")
    return cache / "dbsp" / "hardware" / f"{name}.yaml"


def hardware_for(machine: str | None, device: str, kernel: str) -> Hardware | None:
    """Returns the constants that costs on a "cuda" or "cpu" device are predicted by, or None.

    Args:
        machine: Name or file that a configuration gives. None: this machine's `measured_file`, if there is one.
            Without it there are no constants: those of other machines are not taken for this one's.
        device: Type of the device.
        kernel: Its name, or "auto"; its constants are taken if the file has them.
    """
    if machine is not None:
        return load_hardware(machine).with_kernel(kernel)
    file = measured_file(device)
    return _read_own(file, file.stat().st_mtime_ns).with_kernel(kernel) if file.is_file() else None


@functools.cache
def _read_own(file: Path, _changed_ns: int) -> Hardware:
    return load_hardware(file)


def cost_basis(hardware: Hardware | None) -> str:
    """Returns what costs are estimated by, in words for the log."""
    if hardware is None:
        return RULE
    if hardware.measured:
        return f"constants of {hardware.name}, measured on {hardware.device}"
    labels = ", ".join(dict.fromkeys(hardware.sources.values()))
    return f"constants of {hardware.name}, modelled, not measured ({labels})"
