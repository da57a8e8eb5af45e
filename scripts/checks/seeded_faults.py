"""Breaks the product on purpose, one fault a concept, and checks that a test turns red.

Works on a copy of the checkout in a temporary folder. Prints a table, and exits with 1 if a fault was missed:

    python -m scripts.checks.seeded_faults             # all, in six minutes
    python -m scripts.checks.seeded_faults int8 merge  # those whose concept has one of these words
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
LIMIT_S = 300
"""Most seconds of a selection."""
FOUND, MISSED = 1, 0
"""Exit status of pytest: some tests failed; all passed."""
SEEDED = """
ρ_s counts the slowest rank: dbsp_core/planning/planners.py
- return float(max(blocks) * len(blocks) / total)
+ return float(min(blocks) * len(blocks) / total)
tests/core/planning/test_paper_planner.py

chunks come from ring rank r - i: dbsp_core/planning/chunks.py
- chunk = (self._ring_rank[rank] - source)
+ chunk = (self._ring_rank[rank] + source)
tests/core/planning/test_plan.py

keys sent selectively are those of any row: dbsp_core/planning/chunks.py
- columns_by_rank(owner, world) > 0
+ columns_by_rank(owner, world) > 1
tests/core/planning/test_needed_keys_plan.py

routes shift segments within blocks: dbsp_core/comm/exchange_tables.py
- start = slot * self.axis.block + offset
+ start = slot * self.axis.block
tests/core/comm/test_distributed.py -k 3-U1R3

layouts keep text apart from video: dbsp_core/masks/grid.py
- return [*self._runs, self.tokens - self.text_tokens]
+ return [0, self.tokens]
tests/core/masks/test_grid.py

merge by log-sum-exp: kernels/dbsp_kernels/inputs.py
- return merged.to(out.dtype), finite_top + torch.log(total)
+ return merged.to(out.dtype), finite_top
tests/kernels/test_kernels.py -k TestMerge

tables list full blocks first: kernels/dbsp_kernels/tables.py
- position = torch.where(short, kv_full[:, None] + (needed & short)
+ position = torch.where(short, (needed & short)
tests/core/runtime/test_tables.py

the Triton kernel masks short blocks: kernels/dbsp_kernels/triton/forward.py
- real = start + tl.arange(0, TILE_K) < tl.load(length_ptr + block)
+ real = start + tl.arange(0, TILE_K) <= tl.load(length_ptr + block)
tests/kernels/test_triton.py -k any_scale

dq is added up over chunks: dbsp_core/runtime/backward.py
- dq += dq_part
+ dq = dq_part
tests/core/runtime/test_gradients.py -k 3-U1R3

int8 has a scale of the largest number: kernels/dbsp_kernels/exchange.py
- scale = largest / LARGEST
+ scale = largest / (LARGEST + 1)
tests/kernels/test_segments.py -k scales

mask files have the most significant bit first: dbsp_core/masks/mask_file.py
- np.unpackbits(rows, axis=-1, count=sequence.nk)
+ np.unpackbits(rows, axis=-1, count=sequence.nk, bitorder="little")
tests/core/masks/test_mask_file.py

steps go on where a CFG pass is repeated: dbsp_core/masks/steps.py
- int(timestep < last or cfg_branch in self._branches)
+ int(timestep < last)
tests/core/runtime/test_mask_provider.py -k passes

reuse keeps a plan at the threshold P_s: dbsp_core/runtime/plan_keeper.py
- return counted if counted.rho <= threshold else
+ return counted if counted.rho < threshold else
tests/core/runtime/test_plan_keeper.py -k threshold

errors are raised on all ranks: dbsp_core/comm/consistency.py
- if failed:
+ if problem is not None:
tests/core/comm/test_int8_exchange.py -k rejected_on_all

windows reach half their size: dbsp_core/sources/window.py
- reach = np.array(window) // 2
+ reach = (np.array(window) + 1) // 2
tests/core/sources/test_sources.py

SpargeAttn's vague blocks are dense: dbsp_core/sources/sparge.py
- dense = rows[..., -1] <= self.similarity
+ dense = rows[..., -1] > self.similarity
tests/core/sources/predicted/test_sparge.py -k of_the_paper

predicted bits of all ranks' heads in order: dbsp_core/sources/head_shares.py
- if batch > 1 or heads % group.size:
+ if batch > 1:
tests/core/sources/predicted/test_sol.py -k every_number

redistribution finds its way back: dbsp_core/comm/redistribution.py
- _Way(self.put, self.received, self.take, self.sent, self.slots[::-1])
+ _Way(self.take, self.received, self.put, self.sent, self.slots[::-1])
tests/core/sequences/test_redistribution.py -k 0-2

modelled bytes of all token orders: dbsp_core/cost/prediction.py
- queries += q_source.T
+ queries = q_source.T
tests/core/cost/test_latency.py -k traffic

a pass that missed db-SP is an error: dbsp_diffusers/sharding/coverage.py
- if layer not in reached]
+ if layer in reached and layer not in reached]
tests/diffusers/test_coverage.py
"""
"""Each has its concept and source, the exact text, which occurs once there, what replaces it, and arguments of pytest
that select tests, of which one must fail."""


class Fault(NamedTuple):
    file: str
    text: str
    replacement: str
    tests: str


def faults() -> dict[str, Fault]:
    """Returns faults by their concept."""
    found = {}
    for block in SEEDED.strip().split("\n\n"):
        title, text, replacement, tests = block.splitlines()
        concept, _, file = title.rpartition(": ")
        found[concept] = Fault(file, text.removeprefix("- "), replacement.removeprefix("+ "), tests)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Checks that tests find faults of the product.")
    parser.add_argument("words", nargs="*", help="only faults whose concept or file has one of these words")
    args = parser.parse_args()
    words = args.words or [""]
    chosen = {name: one for name, one in faults().items() if any(word in name + one.file for word in words)}
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder) / "db-sp")
        for number, (concept, fault) in enumerate(chosen.items(), 1):
            start = time.monotonic()
            verdict = tried(fault, copy, number)
            missed += verdict != "caught"
            print(f"{verdict:<7} {time.monotonic() - start:5.0f} s  {concept}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults caught")
    return int(missed > 0)


def copied(to: Path) -> Path:
    """Copies the tracked files of this checkout, as they are now."""
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if (REPO / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, to / name)
    return to


def tried(fault: Fault, copy: Path, number: int) -> str:
    """Runs a fault's tests in a copy that has it, and takes it back. Returns "caught" or what happened."""
    file = copy / fault.file
    sound = file.read_text(encoding="utf-8")
    write(file, sound.replace(fault.text, fault.replacement), 2 * number)
    paths = os.pathsep.join(map(str, (copy, copy / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault.tests.split()]
    environment = os.environ | {"PYTHONPATH": paths}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        write(file, sound, 2 * number + 1)
    return {FOUND: "caught", MISSED: "missed"}.get(done.returncode, f"pytest ended with {done.returncode}")


def write(file: Path, text: str, seconds: int) -> None:
    """Writes a source with a time of its own, as bytecode is known to be old by whole seconds and sizes."""
    file.write_text(text, encoding="utf-8")
    then = time.time() + 10 * seconds
    os.utime(file, (then, then))


if __name__ == "__main__":
    sys.exit(main())
