"""A rank of `dbsp generate` in which something goes wrong: the host's own module, after a function was wrapped."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from scripts.checks.campaign.faults.acts import Injection

FAULT = "DBSP_FAULT"
"""Environment variable: the host's module, a folder for signs, and the fields of an `Injection`."""


def check(*_: object) -> None:
    """As every host's module has it."""


def variables(host: str, folder: Path, injection: Injection) -> dict[str, str]:
    parts = (host, folder, injection.act, injection.rank, injection.target, injection.nth)
    return {FAULT: "|".join(map(str, parts))}


if __name__ == "__main__":
    host, folder, act, rank, target, nth = os.environ[FAULT].split("|")
    Injection(act, int(rank), target, int(nth)).arm(int(os.environ["RANK"]), Path(folder))
    importlib.import_module(host).main(sys.argv[1:])
