"""What the installed Triton's compilers make of the kernels: that they can be fast is read, not believed."""

from __future__ import annotations

import json
import sys

import pytest

from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

pytest.importorskip("triton")
FIELDS = {
    "kernel", "arch", "block_q", "block_k", "width", "dtype", "partial", "triton", "tile_distance", "products",
    "waits", "serialised", "registers", "spills", "shared_bytes", "programs_per_multiprocessor", "stack",
    "local_accesses", "remark",
}  # fmt: skip


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}


def variants(*options: str, status: int = 0, **environment: str) -> list[dict]:
    command = [sys.executable, "-m", "scripts.checks.machine_code", "--json", *options]
    environment |= without_interpreter()
    done = run(command, env=environment, cwd=ROOT)
    assert done.returncode == status, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)["variants"]


@pytest.mark.parametrize(
    "blocks", ["64x64", *(pytest.param(blocks, marks=pytest.mark.long) for blocks in ("64x128", "128x64", "128x128"))]
)
def test_on_hopper_tiles_come_ahead_products_overlap_and_nothing_spills(blocks):
    found = variants("--arch", "sm90", "--dtype", "bf16", "--width", "128", "--blocks", blocks)
    assert all(v["local_accesses"] == v["stack"] == 0 for v in found), found
    found = [v for v in found if v["kernel"] != "sum-tokens"]
    assert {f"{v['block_q']}x{v['block_k']}" for v in found} == {blocks}
    for v in found:
        assert v.keys() >= FIELDS
        assert v["tile_distance"] >= 2, f"tiles of keys and values are fetched while others are worked on: {v}"
        assert (v["serialised"], v["spills"]) == (False, 0), v
        assert v["waits"] <= 6 < v["products"], v
        assert v["fused"] >= v["exponentials"] - 2, (
            f"scores are scaled and their maximum taken off in one instruction: {v}"
        )
        assert v["shared_bytes"] <= 227 << 10, v
        if v["block_q"] == 64 and v["kernel"] == "triton":
            assert v["programs_per_multiprocessor"] == 2, f"one's softmax hides behind the other's products: {v}"


@pytest.mark.long
def test_on_ampere_it_fits_the_smallest_gpus():
    for v in variants("--arch", "sm80", "--dtype", "fp16", "--width", "64", "--blocks", "128x64"):
        assert v["tile_distance"] >= 1, v
        assert v["shared_bytes"] <= 99 << 10, v


SUMS = """
import itertools, json
from scripts.checks.machine_code.variants import Variant, examined

kinds = itertools.product((90, 80), (64, 128), ("bf16", "fp32"))
print(json.dumps([examined(Variant("sum-tokens", arch, 0, 0, *kind, False)) for arch, *kind in kinds]))
"""


def test_sums_of_blocks_live_in_registers():
    """From the same kernel written otherwise, Triton 3.9 makes code with 5.8 KB of a thread's memory."""
    command = [sys.executable, "-c", SUMS]
    done = run(command, env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for found in json.loads(done.stdout.splitlines()[-1]):
        assert (found["local_accesses"], found["stack"], found["spills"]) == (0, 0, 0), found
        assert found["programs_per_multiprocessor"] >= 2, f"others work while one waits for memory: {found}"


PTXAS = """#!/bin/sh
for of in "$@"; do case $of in *.ptx) grep -q bf16 "$of" && echo "no bf16 today" >&2 && exit 1;; esac; done
exec "{}" "$@"
"""


def test_what_cannot_be_compiled_is_a_row_of_its_own(tmp_path):
    """A compiler that refuses bf16 stands for whatever may go wrong with one variant."""
    from triton import knobs

    file = tmp_path / "ptxas"
    file.write_text(PTXAS.format(knobs.nvidia.ptxas.path))
    file.chmod(0o755)
    options = ("--arch", "sm80", "--kernel", "sum-tokens", "--width", "64", "--dtype", "bf16", "fp32", "--jobs", "1")
    refused, compiled = variants(*options, status=1, TRITON_PTXAS_PATH=str(file))
    assert refused["failed"]
    assert refused["remark"].startswith("failed: ")
    assert "registers" not in refused
    assert (compiled["dtype"], compiled["remark"], compiled["products"]) == ("fp32", "no tensor cores", None)
    assert compiled["registers"] > 0


def test_any_of_the_warnings_of_serialised_products_counts():
    from scripts.checks.machine_code.reading import is_serialised

    said = "ptxas info : (C{}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    assert [is_serialised(said.format(code)) for code in (7510, 7514, 7515, 7519, 7520, 751)] == [True] * 4 + [
        False
    ] * 2


CARRIED = """
import json, pathlib, sys
from tests.kernels.kernel_changes import without
from scripts.checks.machine_code import variants

variants.forward_kernel = without("index carried from step to step", pathlib.Path(sys.argv[1])).forward_kernel
print(json.dumps(variants.examined(variants.Variant("triton", 90, 64, 64, 128, "bf16", False))))
"""


def test_an_index_carried_from_step_to_step_would_be_found(tmp_path):
    """The fault that this file is here to find: it switched pipelining off, and serialised the products."""
    command = [sys.executable, "-c", CARRIED, str(tmp_path)]
    done = run(command, env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tile_distance"] == 0
    assert found["serialised"]


MERGE = """
from scripts.checks.machine_code.compiler import compile_kernel
from dbsp_kernels.triton.merge import merge_kernel

types = dict.fromkeys(("out_ptr", "lse_ptr", "part_lse_ptr"), "*fp32") | {"part_ptr": "*bf16", "tokens": "i32"}
assert compile_kernel(merge_kernel, 80, types, {"WIDTH": 128, "TILE": 32, "TILE_D": 128}, set()).sass
"""


def test_the_merge_kernel_compiles():
    done = run([sys.executable, "-c", MERGE], env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
