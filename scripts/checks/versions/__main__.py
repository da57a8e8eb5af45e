"""Oldest and newest versions, as scripts/versions starts them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

from scripts.checks.csv_table import update_table
from scripts.checks.versions.environments import REPO, claimed_requirements, layered, offered, python_version, whole
from scripts.checks.versions.rows import Row, summed_up

PACKAGES = (
    *("torch", "diffusers", "xfuser", "para-attn", "cache-dit", "transformers", "accelerate", "numpy", "safetensors"),
    *("pyyaml", "typer", "rich", "jinja2", "triton"),
)
"""Whose versions are tried: their oldest and newest."""
ALONGSIDE = {"transformers": ("diffusers",), "safetensors": ("diffusers", "transformers")}
"""Packages whose oldest goes with others' oldest alone."""
LIMIT_S = 1200


def main() -> int:
    """Returns the exit code, 1 where something that pyproject.toml admits does not run."""
    parser = argparse.ArgumentParser(
        prog="scripts/versions", description="Oldest and newest versions that are claimed."
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="PACKAGE[==VERSION[,OTHER==VERSION]]",
        help="instead of all; may be repeated",
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH", help="also this one; downloads it all"
    )
    parser.add_argument("--out", type=Path, help="write the table, as CSV; rows of versions not tried now stay")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    rows = []
    for row in tried(options.only, options.python):
        rows.append(row)
        if not options.json:
            print("  ".join(map(str, filter(None, asdict(row).values()))), flush=True)
        if options.out:
            update_table(options.out, [asdict(row) for row in rows], ("package", "version"))
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in rows]}))
    return int(any(row.messages for row in rows))


def tried(only: Sequence[str] | None, pythons: Sequence[str]) -> Iterator[Row]:
    """Tries one environment at a time, each removed before the next."""
    wanted, oldest = PACKAGES if only is None else only, {}
    here = Row("all", "constraints.txt", "installed")
    if not all("==" in text for text in wanted):
        here = judged(here, Path(sys.executable))
        yield here
    for text in wanted:
        package, _, asked = text.partition("==")
        if asked:
            yield in_scratch(
                Row(package, asked, "asked for"), lambda folder, text=text: layered(folder, *text.split(","))
            )
            continue
        versions = offered(claimed_requirements()[package])
        oldest[package] = f"{package}=={versions[0]}"
        for which, one in {"newest": versions[-1], "oldest": versions[0]}.items():
            row = Row(package, str(one), which if len(versions) > 1 else "only")
            alongside = [oldest[other] for other in ALONGSIDE.get(package, ()) if which == "oldest"]
            if str(one) == metadata.version(package).partition("+")[0]:
                yield replace(here, package=row.package, version=row.version, which=row.which)
            elif which == "newest" or len(versions) > 1:
                pinned = [f"{package}=={one}", *alongside]
                yield in_scratch(row, lambda folder, pinned=pinned: layered(folder, *pinned))
            if len(versions) == 1:
                break
    for python in pythons:
        yield in_scratch(
            Row("python", python_version(python), "asked for"),
            lambda folder, python=python: whole(folder, python),
        )


def in_scratch(row: Row, make: Callable[[Path], Path]) -> Row:
    folder = Path(tempfile.mkdtemp(prefix="dbsp-versions-"))
    try:
        return judged(row, make(folder))
    except RuntimeError as error:
        return replace(row, messages=f"cannot be installed: {error}")
    finally:
        shutil.rmtree(folder)


def judged(row: Row, python: Path) -> Row:
    """Returns the row with what `probe.py` finds there."""
    command = [str(python), "-m", "scripts.checks.versions.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=_variables())
    except subprocess.TimeoutExpired:
        return replace(row, messages=f"no answer in {LIMIT_S} s")
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return replace(row, messages=f"cannot be run: {said}")
    return summed_up(row, json.loads(done.stdout.splitlines()[-1]))


def _variables() -> dict[str, str]:
    paths = [str(REPO), str(REPO / "kernels")]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


if __name__ == "__main__":
    raise SystemExit(main())
