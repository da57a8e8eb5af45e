"""Oldest and newest versions that pyproject.toml admits, each in a scratch environment: scripts/versions."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

from scripts.checks.csv_table import update_table
from scripts.checks.versions.environments import REPO, claimed_requirements, layered, offered, python_version, whole

PACKAGES = (
    *("torch", "diffusers", "xfuser", "para-attn", "cache-dit", "transformers", "accelerate", "numpy", "safetensors"),
    *("pyyaml", "typer", "rich", "jinja2", "triton"),
)
"""Whose versions are tried: their oldest and newest."""
ALONGSIDE = {"transformers": ("diffusers",), "safetensors": ("diffusers", "transformers")}
"""Packages whose oldest goes with others' oldest alone."""
TESTS = (
    "tests/core/comm/test_distributed.py::test_attention_on_processes_equals_the_oracle[2]",
    "tests/core/runtime/test_gradients.py::test_gradients_on_processes_equal_the_oracle[2]",
    "tests/diffusers/test_enable.py::test_transformer_equals_one_process",
    "tests/diffusers/test_enable.py::test_pipeline_equals_one_process",
    "tests/diffusers/test_step_caches.py::test_cached_pipeline_equals_one_process",
    "tests/para/test_para.py::test_transformer_equals_one_process",
    "tests/para/test_para.py::test_para_attn_with_its_own_mesh_equals_one_process",
    "tests/xdit/test_xdit_families.py::test_transformer_equals_one_process",
)
"""Exactness of attention, gradients, step caches, and a transformer or pipeline in each framework."""
MOST_SAID = 110
"""Characters of what went wrong."""
LIMIT_S = 1800


@dataclass(frozen=True)
class Row:
    """One version, and what came of it.

    names: private names that hold, of how many;  runs: cases of TESTS that pass, of how many;  messages: of the others
    """

    package: str
    version: str
    which: str
    python: str = ""
    torch: str = ""
    names: str = ""
    runs: str = ""
    messages: str = ""


def main() -> int:
    """Returns the exit code, 1 where something that pyproject.toml admits does not run."""
    parser = argparse.ArgumentParser(prog="scripts/versions", description=__doc__)
    of = "PACKAGE[==VERSION[,OTHER==VERSION]]"
    parser.add_argument("--only", action="append", metavar=of, help="instead of all; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="PATH", help="another one; downloads it all")
    parser.add_argument("--out", type=Path, help="write the table, as CSV; rows of versions not tried now stay")
    options = parser.parse_args()
    rows = []
    for row in tried(options.only, options.python):
        rows.append(asdict(row))
        print("  ".join(filter(None, rows[-1].values())), flush=True)
        if options.out:
            update_table(options.out, rows, ("package", "version"))
    return int(any(row["messages"] for row in rows))


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
            yield _layered(Row(package, asked, "asked for"), *text.split(","))
            continue
        versions = [str(one) for one in offered(claimed_requirements()[package])]
        first, last = versions[0], versions[-1]
        oldest[package] = f"{package}=={first}"
        for which, one in ({"newest": last, "oldest": first} if first != last else {"only": first}).items():
            alongside = [oldest[other] for other in ALONGSIDE.get(package, ()) if which == "oldest"]
            if one == metadata.version(package).partition("+")[0]:
                yield replace(here, package=package, version=one, which=which)
            else:
                yield _layered(Row(package, one, which), f"{package}=={one}", *alongside)
    for python in pythons:
        row = Row("python", python_version(python), "asked for")
        yield _in_scratch(row, lambda folder, python=python: whole(folder, python))


def _layered(row: Row, *pinned: str) -> Row:
    return _in_scratch(row, lambda folder: layered(folder, *pinned))


def _in_scratch(row: Row, make: Callable[[Path], Path]) -> Row:
    with tempfile.TemporaryDirectory(prefix="dbsp-versions-") as folder:
        try:
            return judged(row, make(Path(folder)))
        except RuntimeError as error:
            return replace(row, messages=f"cannot be installed: {error}")


def judged(row: Row, python: Path) -> Row:
    """Returns the row with what is found in an environment: versions, private names, and outcomes of tests."""
    about = "import platform, torch; print(platform.python_version(), torch.__version__)"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "tests.xml")
        pytest = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS)
        try:
            row = replace(row, **dict(zip(("python", "torch"), _said(python, "-c", about).split(), strict=True)))
            found = json.loads(_said(python, "-m", "scripts.checks.versions.private_names").splitlines()[-1])
            _said(python, *pytest, fails=True)
            runs, messages = outcomes(report.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            return replace(row, messages=f"no answer in {LIMIT_S} s")
        except (ChildProcessError, FileNotFoundError) as error:
            return replace(row, messages=f"cannot be run: {error}")
    of = found["of"]
    names = f"{sum(of.values()) - len(found['messages'])} of {sum(of.values())}"
    return replace(row, names=names, runs=runs, messages="; ".join(by_reason(found["messages"]) + messages))


def outcomes(report: str) -> tuple[str, list[str]]:
    """Returns how many cases of a JUnit report passed, of how many, and what the others say."""
    cases = list(ET.fromstring(report).iter("testcase"))
    wrong = [(case.get("name"), one) for case in cases for one in case if one.tag in ("failure", "error", "skipped")]
    said = [f"{name}: {(one.get('message') or one.tag).splitlines()[0][:MOST_SAID]}" for name, one in wrong]
    return f"{len(cases) - len(wrong)} of {len(cases)}", said


def by_reason(messages: Sequence[str]) -> list[str]:
    """Returns each reason of "NAME: REASON" once, with the first of its names and how many others have it."""
    names: dict[str, list[str]] = {}
    for one in messages:
        name, _, reason = one.partition(": ")
        names.setdefault(reason[:MOST_SAID] or one, []).append(name)
    return [
        reason if reason.startswith(first) else f"{first}{f' and {len(others)} others' if others else ''}: {reason}"
        for reason, (first, *others) in names.items()
    ]


def _said(python: Path, *arguments: str, fails: bool = False) -> str:
    """Returns standard output. fails: whether it may. Raises ChildProcessError with the last line of what was said."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    paths = os.pathsep.join((str(REPO), str(REPO / "kernels")))
    done = subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=REPO,
        env=kept | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode and not fails:
        raise ChildProcessError((done.stderr.strip().splitlines() or ["nothing was said"])[-1])
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
