"""A rank of `dbsp generate` in which something goes wrong: the command, after a function was wrapped."""

from __future__ import annotations

import os
from pathlib import Path

from scripts.checks.stress.faults.fault_injection import Injection

FAULT = "DBSP_FAULT"
"""Environment variable: a folder for signs, and the fields of an `Injection`."""


def variables(folder: Path, injection: Injection) -> dict[str, str]:
    return {FAULT: "|".join(map(str, (folder, injection.act, injection.rank, injection.target, injection.nth)))}


def _be_a_rank() -> None:
    from dbsp_cli.entry import dbsp

    folder, act, rank, target, nth = os.environ[FAULT].split("|")
    Injection(act, int(rank), target, int(nth)).arm(int(os.environ["RANK"]), Path(folder))
    dbsp()


if __name__ == "__main__":
    _be_a_rank()
