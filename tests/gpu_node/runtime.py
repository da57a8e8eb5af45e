"""Builds and loads `device_runtime.cpp`. It must be loaded before torch is imported, so nothing here imports torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device_runtime.cpp")
CACHE = Path(__file__).resolve().parents[2] / "build" / "gpu_node"


def why_unavailable() -> str | None:
    """Returns why the simulated node cannot be built here, or None."""
    return None if shutil.which("g++") else "the simulated GPU node needs a C++ compiler (g++)"


def load(devices: int) -> ctypes.CDLL:
    """Loads the runtime with `devices` simulated devices, compiling it once per version of torch and source.

    Raises:
        RuntimeError: If torch is imported already: it asks for its CUDA hooks once, at import.
    """
    if "torch" in sys.modules:
        raise RuntimeError("the simulated runtime must be loaded before torch is imported; start a process for it")
    torch = _torch_folder()
    library = CACHE / f"device_runtime-{_digest(torch)}.so"
    if not library.exists():
        _compile(torch, library)
    ctypes.CDLL(str(torch / "lib" / "libtorch_cpu.so"))
    runtime = ctypes.CDLL(str(library))
    runtime.get_stream.restype = ctypes.c_long
    runtime.set_stream.argtypes = (ctypes.c_int, ctypes.c_long)
    runtime.set_device_count(devices)
    return runtime


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed")
    return Path(spec.origin).parent


def _digest(torch: Path) -> str:
    version = (torch / "version.py").read_bytes()
    return hashlib.sha256(SOURCE.read_bytes() + version).hexdigest()[:16]


def _compile(torch: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = os.path.join(folder, library.name)
        command = ["g++", "-O1", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}", str(SOURCE), "-o", made]
        subprocess.run([*command, f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"], check=True)
        os.replace(made, library)
