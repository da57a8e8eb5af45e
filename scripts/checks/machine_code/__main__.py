"""`scripts/machine_code --arch sm90`: compiles every variant of every Triton kernel and says what became of it.

A variant that cannot be compiled or read is a row that says so, and makes the exit status 1.

Needs triton, and no GPU. Which Triton: the one that is installed, or the one that --triton names. --every-triton
compares the forward kernel under all that are supported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import triton

from scripts.checks.machine_code.reading import MULTIPROCESSORS
from scripts.checks.machine_code.tritons import TRITONS, environment_of
from scripts.checks.machine_code.variants import DTYPES, KERNELS, Variant, failed, reported, shipped

COLUMNS = (
    "kernel", "case", "block_q", "block_k", "head_dim", "dtype", "tile_distance", "products", "products_of_int8",
    "waits", "in_flight", "tile_waits", "exponentials", "instructions", "serialised", "registers", "spills", "stack",
    "local_accesses", "local_in_loops", "shared_bytes", "programs_per_multiprocessor", "remark",
)  # fmt: skip

_PROGRAM = (sys.executable, "-m", "scripts.checks.machine_code")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/machine_code", description=__doc__)
    parser.add_argument("--arch", default="sm90", choices=[f"sm{arch}" for arch in MULTIPROCESSORS])
    parser.add_argument("--json", action="store_true", help="prints a record a line")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, help="head sizes; default: all")
    parser.add_argument("--blocks", nargs="+", help="block_q×block_k as 64x128; default: all, and kernels without")
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, help="default: all")
    parser.add_argument("--case", nargs="+", help="as ring, or '' where nothing sets a launch apart; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--triton", metavar="VERSION", help="another one, which is kept in build/tritons")
    parser.add_argument(
        "--every-triton", action="store_true", help=f"a Markdown table of `triton` under {', '.join(TRITONS)}"
    )
    args = parser.parse_args()
    if args.every_triton:
        return _every_triton(args.arch, args.jobs)
    if args.triton:
        return _under(args.triton)
    arch = int(args.arch.removeprefix("sm"))
    variants = [
        variant
        for variant in shipped(arch)
        if variant.dtype in (*args.dtype, "-")
        and (args.head_dim is None or variant.head_dim in args.head_dim)
        and (args.blocks is None or f"{variant.block_q}x{variant.block_k}" in args.blocks)
        and (args.kernel is None or variant.kernel in args.kernel)
        and (args.case is None or variant.case in args.case)
    ]
    if not args.json:
        print(f"{args.arch}, Triton {triton.__version__}")
        _print_row({name: name for name in COLUMNS})
    any_failed = False
    for record in _records(variants, args.jobs):
        any_failed |= "failed" in record
        if args.json:
            print(json.dumps(record), flush=True)
        else:
            _print_row(record)
    return int(any_failed)


def _records(variants: Sequence[Variant], jobs: int) -> Iterator[dict[str, Any]]:
    """Yields each record as soon as it is known. A compiler that ends its process costs only its own variant."""
    spawn = multiprocessing.get_context("spawn")
    broken = []
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        variant_of = {pool.submit(reported, variant): variant for variant in variants}
        for future in as_completed(variant_of):
            try:
                yield future.result()
            except BrokenProcessPool:  # one of those that were at work, and all that were not begun
                broken.append(variant_of[future])
    for variant in broken:
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            try:
                yield pool.submit(reported, variant).result()
            except BrokenProcessPool as error:
                yield failed(variant, error)


def _under(version: str) -> int:
    """Repeats the run under another Triton. Returns its exit status."""
    arguments = [text for i, text in enumerate(sys.argv[1:]) if text != "--triton" and sys.argv[i] != "--triton"]
    arguments = [text for text in arguments if not text.startswith("--triton=")]
    return subprocess.run([*_PROGRAM, *arguments], env=environment_of(version)).returncode


def _every_triton(arch: str, jobs: int) -> int:
    """Prints the forward kernel in bf16 at D 128 under each Triton. Returns 1 if one serialises it or fails."""
    blocks = ("64x64", "128x64", "128x128")
    shapes = [(size, case) for case in ("", "ring") for size in blocks]
    options = ("--arch", arch, "--dtype", "bf16", "--head-dim", "128", "--kernel", "triton", "--blocks", *blocks)
    print("| Triton | torch |", " | ".join(f"{size}, {case}".removesuffix(", ") for size, case in shapes), "|")
    print("|---" * (2 + len(shapes)) + "|", flush=True)
    status = 0
    for version, torch in TRITONS.items():
        command = [*_PROGRAM, *options, "--json", "--jobs", str(jobs)]
        done = subprocess.run(command, env=environment_of(version), stdout=subprocess.PIPE, text=True)
        records = {(f"{r['block_q']}x{r['block_k']}", r["case"]): r for r in map(json.loads, done.stdout.splitlines())}
        cells = [_cell(records[shape]) for shape in shapes]
        print(f"| {version} | {torch or '–'} |", " | ".join(cells), "|", flush=True)
        status |= done.returncode or any(record["serialised"] for record in records.values())
    return int(status)


def _cell(record: dict[str, Any]) -> str:
    """Returns waits / products, products in flight, registers, and spills and serialisation if there are any."""
    if "failed" in record:
        return record["remark"]
    in_flight = "–" if record["in_flight"] is None else f"{record['in_flight']:.1f}"
    cell = f"{record['waits']}/{record['products']}, {in_flight}, {record['registers']}"
    cell += f", {record['spills']} B" if record["spills"] else ""
    return cell + ", **serialised**" if record["serialised"] else cell


def _print_row(of: dict[str, Any]) -> None:
    """Prints a line of the table, as soon as it is known."""
    cells = ["-" if of.get(name) in (None, "") and name != "remark" else str(of.get(name, "")) for name in COLUMNS]
    *others, remark = (cell.rjust(max(len(name), 10)) for cell, name in zip(cells, COLUMNS, strict=True))
    print("  ".join([*others, remark.strip()]).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
