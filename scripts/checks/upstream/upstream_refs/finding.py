"""Findings of a comparison of masks with another project's, and stubs of what its code needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from scripts.checks.stubs import stub


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


def make_importable(folder: Path, *absent: str) -> None:
    """Makes a project's modules importable here: from its folder, with mocks for packages that need a GPU, and tensors
    that are sent to one staying where they are.
    """
    sys.path.insert(0, str(folder))
    stub(absent, lambda name: mock.MagicMock(name=name))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign,assignment]
    make = torch.tensor
    torch.tensor = lambda *args, device=None, **kwargs: make(*args, **kwargs)  # type: ignore[assignment]
