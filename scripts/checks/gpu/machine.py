"""Description of the GPU suite's machine and sources."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import platform
import shutil
import subprocess
import time
from typing import Any

import torch

from scripts.checks.gpu.setting import Setting
from scripts.checks.gpu.suite import REPO

LIBRARIES = ("torch", "triton", "numpy", "flash_attn", "flash_attn_interface", "flashinfer", "spas_sage_attn")
OTHERS = ("diffusers", "xfuser", "typer", "rich", "pytest")
SOURCES = ("dbsp_*", "kernels", "scripts/checks/gpu", "tests/support", "tests/kernels")


def described(setting: Setting) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    query = ["--query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total", "--format=csv,noheader"]
    properties = [torch.cuda.get_device_properties(device) for device in range(torch.cuda.device_count() * cuda)]
    return {
        "how": setting.how,
        "devices": [device.name for device in properties] or [platform.processor() or platform.machine()],
        "multiprocessors": [device.multi_processor_count for device in properties],
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "memory": [device.total_memory for device in properties],
        "nvidia_smi": output_of(["nvidia-smi", *query]).splitlines(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "imports": {name: importlib.util.find_spec(name) is not None for name in OTHERS},
        "commit": output_of(["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]) or "unknown",
        "sources": sources_fingerprint(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def sources_fingerprint() -> str:
    """Returns hexadecimal digits that change with any source of the suite; a machine may have no git."""
    digest = hashlib.sha256()
    files = (file for pattern in SOURCES for folder in REPO.glob(pattern) for file in folder.rglob("*"))
    for file in sorted(file for file in files if file.suffix in (".py", ".yaml")):
        digest.update(str(file.relative_to(REPO)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _version(name: str) -> str:
    """Returns the version of a library, what is raised when it is imported, or "" where it is not installed."""
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def output_of(command: list[str]) -> str:
    """Returns what a program prints, or "" if it is not here or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""
