"""Findings of a comparison of masks with another project's, and stubs of what its code needs."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch


@dataclass(frozen=True)
class Finding:
    """One comparison. unit: what is counted in `compared`, `theirs_only` and `ours_only`"""

    project: str
    commit: str
    what: str
    unit: str
    compared: int
    theirs_only: int
    ours_only: int
    density_theirs: float
    density_ours: float
    note: str

    @property
    def equal(self) -> bool:
        return self.theirs_only == self.ours_only == 0


def compared(
    project: str, folder: Path, what: str, theirs: Any, ours: Any, note: str = "", unit: str = "blocks"
) -> Finding:
    """Compares two bool arrays of one shape."""
    theirs, ours = np.asarray(theirs, dtype=bool), np.asarray(ours, dtype=bool)
    if theirs.shape != ours.shape:
        raise ValueError(f"{what}: theirs {theirs.shape}, ours {ours.shape}")
    only = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
    densities = float(theirs.mean()), float(ours.mean())
    return Finding(project, commit_of(folder), what, unit, theirs.size, *only, *densities, note)


def commit_of(folder: Path) -> str:
    """Returns the commit of a checkout; of an unpacked archive, none."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=10", "--show-toplevel", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return found[1] if len(found) == 2 and Path(found[0]) == folder.resolve() else ""


def stub(folder: Path, *absent: str) -> None:
    """Makes a project's modules importable here: from its folder, with mocks for packages that need a GPU, and tensors
    that are sent to one staying where they are.
    """
    sys.path.insert(0, str(folder))
    sys.meta_path.insert(0, _Absent(absent))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    make = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: make(*args, **kwargs)  # type: ignore[assignment]


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name in self._names or name.partition(".")[0] in self._names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Mocked(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Mocked(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)
