"""Other projects' own test suites, unchanged, stock and with db-SP: what ran, what passed, what could not and why.

    python -m scripts.checks.upstream.run_suites [--only NAME …] [--work FOLDER] [--diffusers CHECKOUT] [--out CSV]

Each suite runs twice, from the same seeds. A test that passes stock and fails with db-SP, unless it is rejected in one
line, and a model's output that differs by more than 1e-5 of its largest value (2e-2 in 16 bits), is a failure of ours:
the exit code is then 1. Nothing is installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.checks.csv_table import update_table
from scripts.checks.upstream.counting import COUNTED, attentions_counted
from scripts.checks.upstream.outcomes import compare_outputs, outcomes_of
from scripts.checks.upstream.suites import SUITES, Suite, sources_of

ROOT = Path(__file__).resolve().parents[3]
BOUND, BOUND_HALF = 1e-5, 2e-2
REJECTIONS = ("UserError", "db-SP does not", "the texts of one batch differ in length", "is not one grid of tokens")
"""What a failure's reason says where db-SP said in one line that it does not run this; some tests quote it alone."""
PYTEST = [
    "-m",
    "pytest",
    "-q",
    "--runxfail",
    "-p",
    "no:xdist",
    "-p",
    "no:cacheprovider",
    "-p",
    "scripts.checks.upstream.suite_plugin",
    "--tb=short",
]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@dataclass(frozen=True)
class Row:
    """One suite.

    ran:      tests that were not skipped
    rejected:  passed stock, and db-SP said in one line that it does not run this;  failed_with_dbsp: any other way
    compared, worst, worst_half: see `Comparison`
    """

    suite: str
    what: str
    version: str
    ran: int
    passed_stock: int
    passed_dbsp: int
    rejected: int
    failed_with_dbsp: int
    attentions_by_dbsp: int
    compared: int
    worst: float
    worst_half: float
    why_rejected: str
    why_failed_with_dbsp: str
    why_failed_stock: str
    skipped: int
    why_skipped: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[suite.name for suite in SUITES], metavar="NAME")
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "upstream", help="where sources are unpacked")
    parser.add_argument("--diffusers", type=Path, help="a checkout of diffusers (default: its tag is cloned)")
    parser.add_argument("--out", type=Path, help="a CSV file, in which rows of other suites stay as they are")
    parser.add_argument("--minutes", type=float, default=20, help="limit of each run")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for suite in SUITES:
        if options.only is None or suite.name in options.only:
            folder, version = sources_of(suite.package, options.work, options.diffusers)
            rows.append(_row(suite, folder, version, options.work, options.minutes))
            print(*(f"{name}: {value}" for name, value in asdict(rows[-1]).items()), sep="\n", end="\n\n", flush=True)
            if options.out is not None:
                order = [(suite.name,) for suite in SUITES]
                update_table(options.out, [_printable(row) for row in rows], ("suite",), order)
    sys.exit(any(row.failed_with_dbsp or row.worst > BOUND or row.worst_half > BOUND_HALF for row in rows))


def _row(suite: Suite, folder: Path, version: str, work: Path, minutes: float) -> Row:
    stock, dbsp = (run_suite(suite, folder, work, mode, minutes) for mode in ("stock", "dbsp"))
    found = compare_outputs(*(work / f"{suite.name}.{mode}.pt" for mode in ("stock", "dbsp")))
    ran = {test for test, (outcome, _) in stock.items() if outcome != "skipped"}
    passed = {test for test in ran if stock[test][0] == "passed"}
    lost = {test: dbsp.get(test, ("", "not reached")) for test in sorted(passed)}
    lost = {test: why for test, (outcome, why) in lost.items() if outcome != "passed"}
    rejected = {test for test, why in lost.items() if any(words in why for words in REJECTIONS)}
    return Row(
        suite.name,
        suite.what,
        version,
        len(ran),
        len(passed),
        len(passed) - len(lost),
        len(rejected),
        len(lost) - len(rejected),
        attentions_counted(work / f"{suite.name}.dbsp.attentions"),
        found.compared,
        found.worst,
        found.worst_half,
        _counted(lost[test] for test in rejected),
        "; ".join(f"{test}: {why}" for test, why in lost.items() if test not in rejected),
        _counted(stock[test][1] for test in ran - passed),
        len(stock) - len(ran),
        _counted(why for outcome, why in stock.values() if outcome == "skipped"),
    )


def _counted(reasons: Iterable[str]) -> str:
    """The five most frequent."""
    return "; ".join(f"{count} × {why}" for why, count in Counter(reasons).most_common(5))


def run_suite(suite: Suite, folder: Path, work: Path, mode: str, minutes: float) -> dict[str, tuple[str, str]]:
    """By test: "passed", "skipped" or "failed", and why."""
    report = (work / f"{suite.name}.{mode}.xml").resolve()
    environment = os.environ | {
        "PYTHONPATH": str(_packages(work.resolve() / "packages")),
        "DBSP_UPSTREAM": mode,
        "DBSP_UPSTREAM_SUITE": suite.package,
        "DBSP_UPSTREAM_OUTPUTS": str(report.with_suffix(".pt")),
        COUNTED: str(report.with_suffix(".attentions")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if suite.strategy is not None:
        environment["DBSP_UPSTREAM_STRATEGY"] = suite.strategy
    launch = [*(TORCHRUN if suite.strategy is not None and mode == "dbsp" else []), *PYTEST]
    for suffix in (".xml", ".pt", ".attentions"):
        report.with_suffix(suffix).unlink(missing_ok=True)
    command = [sys.executable, *launch, f"--junitxml={report}", *suite.options, *suite.tests]
    with (work / f"{suite.name}.{mode}.log").open("w", encoding="utf-8") as log:
        try:
            subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=minutes * 60)
        except subprocess.TimeoutExpired:
            print(f"{suite.name} ({mode}): not done in {minutes} minutes", file=sys.stderr)
    return outcomes_of(report) if report.exists() else {}


def _packages(folder: Path) -> Path:
    """A folder of links to db-SP's packages and `scripts`, without `tests`: other projects have one of that name."""
    folder.mkdir(exist_ok=True)
    for package in (*ROOT.glob("dbsp_*"), ROOT / "kernels" / "dbsp_kernels", ROOT / "scripts"):
        if not (folder / package.name).is_symlink():
            (folder / package.name).symlink_to(package)
    return folder


def _printable(row: Row) -> dict[str, object]:
    return asdict(row) | {name: f"{getattr(row, name):.1e}" for name in ("worst", "worst_half")}


if __name__ == "__main__":
    main()
