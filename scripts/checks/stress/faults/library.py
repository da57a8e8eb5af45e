"""One rank of a case of the library by itself, on gloo."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

from scripts.checks.stress.faults.fault_injection import Injection
from scripts.checks.stress.faults.programs import PROGRAMS, Values

TIMEOUT_S = 4.0
"""Of the process group."""


@dataclass(frozen=True)
class Ranks:
    """world: ranks;  odd: what the odd rank is given instead, by field of `Values`;  version: package that it has
    another version of"""

    program: str
    world: int
    values: Values
    injection: Injection | None = None
    odd_rank: int = 0
    odd: dict[str, Any] = field(default_factory=dict)
    version: str | None = None


def be_a_rank(ranks: Ranks, rank: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.chdir(folder)
    if ranks.injection is not None:
        ranks.injection.arm(rank, folder)
    values = ranks.values
    if rank == ranks.odd_rank:
        values = replace(values, **ranks.odd)
        if ranks.version is not None:
            _have_another_version_of(ranks.version)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_S), ranks.world, rank)
    error = PROGRAMS[ranks.program](values)
    (folder / f"result{rank}").write_text(repr(error), encoding="utf-8")
    dist.destroy_process_group()


def _have_another_version_of(package: str) -> None:
    real = metadata.version

    def version(name: str) -> str:
        return "0.0.1+other" if name == package else real(name)

    metadata.version = version
    for module in list(sys.modules.values()):
        if getattr(module, "version", None) is real:
            module.version = version  # type: ignore[attr-defined]
