"""`python -m dbsp_kernels.machine_code --arch sm90`: compiles every shipped variant and says what became of it.

Needs triton, and no GPU. Which Triton: the one that can be imported (PYTHONPATH chooses among several).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import triton

from dbsp_kernels.machine_code.reading import MULTIPROCESSORS
from dbsp_kernels.machine_code.variants import DTYPES, examined, shipped

COLUMNS = (
    "kernel", "block_q", "block_k", "width", "dtype", "partial", "tile_distance", "products", "waits", "tile_waits",
    "exponentials", "instructions", "serialised", "registers", "spills", "shared_bytes", "programs_per_multiprocessor",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dbsp_kernels.machine_code", description=__doc__)
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
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(examined, variants))
    if args.json:
        print(json.dumps({"variants": found}))
        return 0
    table = [COLUMNS, *([str(of[name]) for name in COLUMNS] for of in found)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print(f"{args.arch}, Triton {triton.__version__}")
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
