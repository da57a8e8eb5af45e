"""The constants of the machine that a run is on: measured by `scripts.calibrate`, named by the user, or not known."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from dbsp_core.cost.hardware import Hardware, device_class, load_hardware

__all__ = ["RULE", "cost_basis", "hardware_for", "measured_file"]

RULE = "rules without constants; `python -m scripts.calibrate`, in a checkout, measures this machine"
"""What costs are estimated by if `hardware_for` returns None, in words."""


def measured_file(device: str) -> Path:
    """Returns the file in which `scripts.calibrate` keeps the constants of this machine's "cuda" or "cpu" device.

    Machines with other devices may share the folder: `$XDG_CACHE_HOME/dbsp/hardware`, or ~/.cache/dbsp/hardware.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    name = re.sub(r"[^a-z0-9]+", "-", device_class(device).lower()).strip("-")
    return cache / "dbsp" / "hardware" / f"{name}.yaml"


def hardware_for(cost_model: str | None, device: str, kernel: str) -> Hardware | None:
    """Returns the constants that costs on a "cuda" or "cpu" device are predicted by, or None.

    Args:
        cost_model: Name or file that a configuration gives. None: this machine's `measured_file`, if there is one.
            Without it there are no constants: those of other machines are not taken for this one's.
        device: Type of the device.
        kernel: Its name, or "auto"; its constants are taken if the file has them.
    """
    if cost_model is not None:
        return load_hardware(cost_model).with_kernel(kernel)
    file = measured_file(device)
    return _read(file, file.stat().st_mtime_ns).with_kernel(kernel) if file.is_file() else None


@functools.cache
def _read(file: Path, _changed_ns: int) -> Hardware:
    return load_hardware(file)


def cost_basis(hardware: Hardware | None) -> str:
    """Returns what costs are estimated by, in words for the log."""
    if hardware is None:
        return RULE
    if hardware.measured:
        return f"constants of {hardware.name}, measured on {hardware.device}"
    labels = ", ".join(dict.fromkeys(hardware.sources.values()))
    return f"constants of {hardware.name}, modelled, not measured ({labels})"
