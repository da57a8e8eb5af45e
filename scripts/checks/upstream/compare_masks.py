"""Masks of other projects' own code against ours: run for comparison, from checkouts of theirs, nothing of it kept.

    python -m scripts.checks.upstream.compare_masks --radial FOLDER --svg FOLDER --paro FOLDER
        --nabla [--out FILE.csv]

    --radial  a checkout of https://github.com/mit-han-lab/radial-attention
    --svg     of https://github.com/svg-project/Sparse-VideoGen
    --paro    of https://github.com/jamescsq47/PAROAtten
    --nabla   the installed diffusers

Their packages for GPUs are replaced by mocks; what is compared needs none. Each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from scripts.checks.upstream.upstream_refs.finding import Finding

MODULES = {"radial": "radial_attention", "svg": "sparse_videogen", "paro": "paroattention", "nabla": "diffusers_nabla"}
"""Of upstream_refs, each with `findings` of a checkout; the last is of what is installed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("radial", "svg", "paro"):
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER")
    parser.add_argument("--nabla", action="store_const", const=Path())
    parser.add_argument("--out", type=Path, metavar="FILE.csv")
    options = parser.parse_args()
    found: list[Finding] = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name, module in MODULES.items():
            if getattr(options, name) is not None:
                found += pool.apply(_findings, (module, getattr(options, name)))
    for one in found:
        apart = "equal" if one.equal else f"theirs only {one.theirs_only}, ours only {one.ours_only}; {one.note}"
        print(f"{one.project}: {one.what}: {one.compared} {one.unit}: {apart}")
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(Finding.__dataclass_fields__), lineterminator="\n")
            writer.writeheader()
            writer.writerows(_printable(one) for one in found)


def _printable(one: Finding) -> dict[str, object]:
    return asdict(one) | {name: f"{getattr(one, name):.4f}" for name in ("density_theirs", "density_ours")}


def _findings(module: str, folder: Path) -> list[Finding]:
    findings: Callable[[Path], object] = import_module(f"scripts.checks.upstream.upstream_refs.{module}").findings
    return list(findings(folder.resolve()))  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
