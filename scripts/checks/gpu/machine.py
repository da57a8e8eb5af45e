"""Description of the GPU suite's machine, as JSON on standard output: python -m scripts.checks.gpu.machine."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

from scripts.checks.gpu.journal import REPO, sources_fingerprint

LIBRARIES = ("torch", "triton", "numpy", "safetensors", "flash_attn", "flash_attn_interface", "spas_sage_attn")
OTHERS = (
    *("diffusers", "xfuser", "para_attn", "vllm_omni", "sglang", "lightx2v"),
    *("typer", "rich", "pytest", "matplotlib"),
)


def main() -> None:
    json.dump(described(), sys.stdout)


def described() -> dict[str, Any]:
    """Devices, driver, versions, commit and date."""
    import torch

    cuda = torch.cuda.is_available()
    number = torch.cuda.device_count() if cuda else 0
    query = ["--query-gpu=name,driver_version,clocks.max.sm,power.limit,memory.total", "--format=csv,noheader"]
    properties = [torch.cuda.get_device_properties(device) for device in range(number)]
    return {
        "devices": [one.name for one in properties] or [platform.processor() or platform.machine()],
        "multiprocessors": [one.multi_processor_count for one in properties],
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "memory": [one.total_memory for one in properties],
        "nvidia_smi": _output(["nvidia-smi", *query]).splitlines(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
        "imports": {name: importlib.util.find_spec(name) is not None for name in OTHERS},
        "commit": _output(["git", "-C", str(REPO), "describe", "--always", "--dirty", "--abbrev=12"]) or "unknown",
        "sources": sources_fingerprint(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _version(name: str) -> str:
    """Returns the version of a library, what is raised when it is imported, or "" where it is not installed."""
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _output(command: list[str]) -> str:
    """Returns what a program prints, or "" if it is not here or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    main()
