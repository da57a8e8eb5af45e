"""Versions of Triton that torch brings, each in a folder that is kept between runs: build/tritons/VERSION."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import version as installed_version
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
TRITONS = ("3.5.1", "3.6.0", "3.7.0", "3.8.0", "3.9.0")
"""Versions that machine code is read under, oldest first: those that torch for GPUs pins, and our environment's."""

FOLDER = REPO / "build" / "tritons"


def folder_of(version: str) -> Path:
    """Returns the folder with this Triton, to be put first on PYTHONPATH; installs it there if it is not there yet.

    It is there whole or not at all: pip works in a scratch folder, which is then renamed. Raises RuntimeError with
    pip's reason.
    """
    folder = FOLDER / version
    if folder.exists():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".") as scratch:
        whole = Path(scratch, version)
        options = ["--quiet", "--no-deps", "--no-compile", "--disable-pip-version-check", "--target", str(whole)]
        command = [sys.executable, "-m", "pip", "install", *options, f"triton=={version}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["pip gave no reason"])[-1])
        try:
            whole.rename(folder)
        except OSError:  # another process was faster
            if not folder.exists():
                raise
    return folder


def environment_of(version: str) -> dict[str, str]:
    """Returns an environment for Python in which this Triton is imported; installs it if needed."""
    paths = [str(REPO), str(REPO / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    if version != installed_version("triton"):
        paths.insert(0, str(folder_of(version)))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
