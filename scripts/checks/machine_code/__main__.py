"""`scripts/machine_code --arch sm90`: compiles every variant of every Triton kernel; prints a line of JSON for each.

A variant that cannot be compiled or read is a line that says so, and makes the exit status 1. Needs triton, no GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

from scripts.checks.machine_code.reading import MULTIPROCESSORS
from scripts.checks.machine_code.tritons import environment_of
from scripts.checks.machine_code.variants import DTYPES, KERNELS, reported, shipped


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/machine_code", description=__doc__)
    parser.add_argument("--arch", default="sm90", choices=[f"sm{arch}" for arch in MULTIPROCESSORS])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dim", nargs="+", type=int, help="head sizes; default: all")
    parser.add_argument("--blocks", nargs="+", help="block_q×block_k as 64x128; default: all, and kernels without")
    parser.add_argument("--kernel", nargs="+", choices=KERNELS, help="default: all")
    parser.add_argument("--case", nargs="+", help="as ring, or '' where nothing sets a launch apart; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument("--triton", metavar="VERSION", help="another one, which is kept in build/tritons")
    args = parser.parse_args()
    if args.triton:
        # Without the option, in another Triton's environment.
        words = [word for i, word in enumerate(sys.argv[1:]) if "--triton" not in (word, sys.argv[i])]
        command = [sys.executable, "-m", "scripts.checks.machine_code", *words]
        return subprocess.run(command, env=environment_of(args.triton)).returncode
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
    any_failed = False
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(reported, variant) for variant in variants]):
            record = future.result()
            any_failed |= "failed" in record
            print(json.dumps(record), flush=True)
    return int(any_failed)


if __name__ == "__main__":
    sys.exit(main())
