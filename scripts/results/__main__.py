"""Draws the pictures of docs/results again from their CSVs; nothing is computed or measured anew.

python -m scripts.results                       all of them
python -m scripts.results table1 fig8             some
python -m scripts.results --stale               files whose sources have changed since they were made
"""

from __future__ import annotations

import argparse
import importlib
import sys

from dbsp_core.utils.errors import UserError
from scripts.results.evidence import changes_since, read_evidence
from scripts.results.result import FOLDER, Result

MODULES = (
    *(f"scripts.reproduce.{name}" for name in ("table1", "fig3", "fig8", "fig9", "fig10", "worth")),
    "scripts.bench.reuse",
    *(f"scripts.reproduce.{name}" for name in ("fig11", "fig12")),
    *(f"scripts.reproduce.knapformer.{name}" for name in ("throughput", "streams")),
    "scripts.training.trained_model.quality",
)
"""Each has its results as values of its own."""


def results() -> dict[str, Result]:
    values = [value for name in MODULES for value in vars(importlib.import_module(name)).values()]
    return {value.name: value for value in values if isinstance(value, Result)}


def print_stale() -> None:
    """Prints the files whose sources have changed since they were made, with the changes counted."""
    entries = read_evidence()
    stale = 0
    for entry in entries:
        changes = changes_since(entry)
        if changes is None:
            print(f"{entry.files[0]}: this clone lacks commit {entry.commit}")
        elif changes:
            stale += 1
            more = f" and {len(changes) - 2} more" if len(changes) > 2 else ""
            print(f"{entry.files[0]}: {', '.join(changes[:2])}{more} changed since {entry.commit} ({entry.command})")
    print(f"{stale} of {len(entries)} results are older than their sources")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of the files, without their ends; all where none")
    parser.add_argument("--stale", action="store_true", help="print the files whose sources have changed since")
    options = parser.parse_args()
    if options.stale:
        print_stale()
        return
    known = results()
    if unknown := [name for name in options.names if name not in known]:
        parser.error(f"expected names of {', '.join(known)}, got {unknown[0]}")
    try:
        for name in options.names or known:
            print(f"drew {known[name].redraw(FOLDER)}")
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
