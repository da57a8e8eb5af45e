"""`scripts/machine_code --arch sm90`: compiles every shipped variant and says what became of it.

A variant that cannot be compiled or read is a row that says so, and makes the exit status 1.

Needs triton, and no GPU. Which Triton: the one that can be imported (PYTHONPATH chooses among several).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import triton

from scripts.checks.machine_code.reading import MULTIPROCESSORS
from scripts.checks.machine_code.variants import DTYPES, failed, reported, shipped

COLUMNS = (
    "kernel", "block_q", "block_k", "width", "dtype", "partial", "tile_distance", "products", "waits", "tile_waits",
    "exponentials", "instructions", "serialised", "registers", "spills", "local_accesses", "shared_bytes",
    "programs_per_multiprocessor", "remark",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/machine_code", description=__doc__)
    parser.add_argument("--arch", default="sm90", choices=[f"sm{arch}" for arch in MULTIPROCESSORS])
    parser.add_argument("--json", action="store_true", help='prints {"variants": […]}')
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--width", nargs="+", type=int, help="head sizes; default: all")
    parser.add_argument("--blocks", nargs="+", help="block_q×block_k as 64x128; default: all")
    parser.add_argument("--kernel", nargs="+", help="by name; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    args = parser.parse_args()
    variants = [
        variant
        for variant in shipped(int(args.arch.removeprefix("sm")))
        if variant.dtype in args.dtype
        and (args.width is None or variant.width in args.width)
        and (args.blocks is None or f"{variant.block_q}x{variant.block_k}" in args.blocks)
        and (args.kernel is None or variant.kernel in args.kernel)
    ]
    if not args.json:
        print(f"{args.arch}, Triton {triton.__version__}")
        _print_row({name: name for name in COLUMNS})
    found = []
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for variant, coming in [(variant, pool.submit(reported, variant)) for variant in variants]:
            try:
                one = coming.result()
            except BrokenProcessPool as error:  # a compiler took its process with it
                one = failed(variant, error)
            found.append(one)
            if not args.json:
                _print_row(one)
    if args.json:
        print(json.dumps({"variants": found}))
    return int(any("failed" in one for one in found))


def _print_row(of: dict[str, Any]) -> None:
    """A line of the table, as soon as it is known."""
    cells = ["-" if of.get(name) is None else str(of[name]) for name in COLUMNS]
    *others, remark = (cell.rjust(max(len(name), 10)) for cell, name in zip(cells, COLUMNS, strict=True))
    print("  ".join([*others, remark.strip()]).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
