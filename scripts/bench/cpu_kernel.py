"""The CPU kernel's rate per block over dense attention's, and what bounds it; in turns, the fastest of each.

python -m scripts.bench.cpu_kernel            a table
python -m scripts.bench.cpu_kernel --json     the same numbers for a program
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

from dbsp_core.cost.hardware import device_class
from dbsp_kernels import KernelInputs
from dbsp_kernels.backends.cpu import cpu_attention

DENSITIES = (0.1, 0.25, 0.5, 0.75, 1.0)
WITHOUT_LISTS = 0.25
"""The density at which the operator and the gathering are timed on their own."""


def contenders(blocks: int, block: int, width: int) -> dict[str, tuple[Callable[[], object], int]]:
    """By name a work, and how many pairs of blocks it computes."""
    generator = torch.Generator().manual_seed(0)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = (torch.randn(blocks, block, width, generator=generator) for _ in range(3))
    length = torch.full((blocks,), block, dtype=torch.int32)

    def sparse(density: float) -> tuple[Callable[[], object], int]:
        count = max(1, round(density * blocks))
        lists = [torch.randperm(blocks, generator=generator)[:count].sort().values for _ in range(blocks)]
        index = torch.stack(lists).int()
        inputs = KernelInputs(q, k, v, index, torch.full((blocks,), count).int(), length, width**-0.5)
        return lambda: cpu_attention(inputs), count * blocks

    whole = [t.view(1, 1, -1, width) for t in (q, k, v)]
    count = max(1, round(WITHOUT_LISTS * blocks))
    keys, values = torch.randn(2, blocks, 1, count * block, width, generator=generator)
    picked = torch.randint(blocks, (count * blocks // 8, 8), generator=generator)
    memory = torch.empty(8, block, width)

    def gather() -> None:
        for some in picked:
            for source in (k, v):
                torch.index_select(source, 0, some, out=memory)

    return {
        "dense": (lambda: flash(*whole), blocks * blocks),
        **{f"cpu, density {density}": sparse(density) for density in DENSITIES},
        "its operator alone, rows as sequences": (lambda: flash(q[:, None], keys, values), count * blocks),
        "its gathering alone": (gather, picked.numel()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    works = contenders(args.blocks, args.block, args.width)
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(args.turns + 1):
        for name, (work, pairs) in works.items():
            start = time.thread_time()  # of this core: neighbours' work does not count
            work()
            if turn:  # the first warms up
                seconds[name].append((time.thread_time() - start) / pairs)
    per_block = {name: min(found) for name, found in seconds.items()}  # neighbours can only make it slower
    rates = {name: per_block["dense"] / value for name, value in per_block.items()}
    if args.json:
        device = device_class("cpu").removesuffix(", one core per rank")
        about = {"label": "measured, one core", "device": device, "torch": str(torch.__version__)}
        about |= {key: getattr(args, key) for key in ("blocks", "block", "width", "turns")}
        found = {name: {"us_per_block": per_block[name] * 1e6, "over_dense": rates[name]} for name in works}
        print(json.dumps({**about, "works": found}, indent=1))
        return
    for name in works:
        print(f"{name:40} {per_block[name] * 1e6:7.2f} µs a block   {rates[name]:5.2f} of dense")


if __name__ == "__main__":
    main()
