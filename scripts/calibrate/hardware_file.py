"""Hardware files as calibration writes them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict

import torch
import yaml

from dbsp_core.cost.machine import Hardware
from dbsp_core.utils.files import write_atomically
from dbsp_core.utils.process import installed_version

__all__ = ["save_hardware", "software_versions"]


def save_hardware(
    path: str | os.PathLike[str], hardware: Hardware, record: Mapping[str, object] | None = None
) -> None:
    """Writes a YAML file that `load_hardware` reads, whole or not at all. `record` says how it was made."""
    values = {key: value for key, value in asdict(hardware).items() if value is not None} | dict(record or {})
    for given in (values["constants"], *values["kernels"].values()):
        for key in [key for key, value in given.items() if value is None]:
            del given[key]
    write_atomically(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100))


def software_versions(kernel: str) -> dict[str, str]:
    """Returns what a measurement depends on: db-SP, torch and the kernel."""
    own = installed_version("dbsp-attention") or "not installed"
    return {"dbsp-attention": own, "torch": str(torch.__version__), "kernel": kernel}
