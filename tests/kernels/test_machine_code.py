"""What the installed Triton's compilers make of the kernels: that they can be fast is read, not believed."""

from __future__ import annotations

import functools
import json
import sys

import pytest

from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

pytest.importorskip("triton")
from scripts.checks.machine_code.variants import ATTENTION, SHIPPED

FIELDS = {
    "kernel", "arch", "block_q", "block_k", "head_dim", "dtype", "case", "triton", "tile_distance", "products",
    "products_of_int8", "waits", "in_flight", "serialised", "registers", "spills", "shared_bytes",
    "programs_per_multiprocessor", "stack",
    "local_accesses", "local_in_loops", "remark",
}  # fmt: skip


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}


def variants(*options: str, status: int = 0, **environment: str) -> list[dict]:
    command = [sys.executable, "-m", "scripts.checks.machine_code", "--json", *options]
    environment |= without_interpreter()
    done = run(command, env=environment, cwd=ROOT)
    assert done.returncode == status, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SPILLED_ONCE_A_ROW = {"128x128": 64, "120x120": 160}
"""Most bytes per thread that the forward kernel spills outside its loops."""


USUAL, LONG = ("64x64", "120x120"), ("64x128", "128x64", "128x128")


@functools.cache
def on_hopper(blocks: tuple[str, ...]) -> list[dict]:
    """Variants of blocks, compiled by one process."""
    return variants("--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", "--jobs", "1", "--blocks", *blocks)


@pytest.mark.parametrize("blocks", [*USUAL, *(pytest.param(blocks, marks=pytest.mark.long) for blocks in LONG)])
def test_on_hopper_tiles_come_ahead_products_overlap_and_nothing_spills(blocks):
    together = USUAL if blocks in USUAL else LONG
    found = [v for v in on_hopper(together) if f"{v['block_q']}x{v['block_k']}" == blocks]
    assert found
    for v in found:
        assert v.keys() >= FIELDS
        if v["kernel"] == "triton" and blocks in SPILLED_ONCE_A_ROW:
            assert (v["local_in_loops"], v["spills"] <= SPILLED_ONCE_A_ROW[blocks]) == (0, True), v
        else:
            assert (v["local_accesses"], v["stack"], v["spills"]) == (0, 0, 0), v
        assert v["tile_distance"] >= 2, f"tiles of keys and values are fetched while others are worked on: {v}"
        assert not v["serialised"], v
        assert v["waits"] <= 6 < v["products"], v
        assert (v["products_of_int8"] > 0) == (v["kernel"] == "triton-int8"), v
        assert v["fused"] >= v["exponentials"] - 2, (
            f"scores are scaled and their maximum taken off in one instruction: {v}"
        )
        assert v["shared_bytes"] <= 227 << 10, v
        if v["block_q"] == 64 and v["kernel"] == "triton":
            assert v["programs_per_multiprocessor"] == 2, f"one's softmax hides behind the other's products: {v}"


SHARED = {"sm80": 99 << 10, "sm90": 227 << 10, "sm120": 99 << 10}
"""Most shared memory of a program; 99 KB is that of the smallest GPUs since sm80."""


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED)
def test_every_shipped_shape_fits_the_smallest_gpus_and_lives_in_registers(arch):
    found = variants("--arch", arch, "--dtype", "bf16", "--kernel", *ATTENTION)
    assert {(v["block_q"], v["block_k"], v["head_dim"]) for v in found} == set(SHIPPED)
    for v in found:
        assert v["shared_bytes"] <= SHARED[arch], v
        assert v["local_in_loops"] == 0, v
        if min(v["block_q"], v["block_k"], v["head_dim"]) >= 64:  # tiny blocks need no tiles ahead
            assert v["tile_distance"] >= 1, v
            assert not v["serialised"], v


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED)
def test_every_shipped_shape_compiles_in_float32(arch):
    found = variants("--arch", arch, "--dtype", "fp32", "--kernel", "triton")
    assert {(v["block_q"], v["block_k"], v["head_dim"]) for v in found} == set(SHIPPED)
    assert all(v["shared_bytes"] <= SHARED[arch] for v in found)


OTHERS = (
    "sum-tokens",
    "pool-rows",
    "scores",
    "select",
    "merge",
    "copy",
    "quantise",
    "quantise-blocks",
    "restore",
    "expand-rows",
    "pack-rows",
)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "sm120"])
def test_loops_without_tensor_cores_live_in_registers(arch):
    """From one of them written otherwise, Triton 3.9 makes code with 5.8 KB of a thread's memory."""
    found = variants("--arch", arch, "--dtype", "bf16", "--kernel", *OTHERS, "--jobs", "1")
    assert {v["kernel"] for v in found} == set(OTHERS)
    for v in found:
        assert v["local_in_loops"] == 0, v
        if "5000" not in v["case"]:  # which Triton 3.9 gives up to 72 bytes of stack on sm120, outside its loop
            assert (v["local_accesses"], v["stack"], v["spills"]) == (0, 0, 0), v
        if v["kernel"] == "sum-tokens":
            assert v["programs_per_multiprocessor"] >= 2, f"others work while one waits for memory: {v}"


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm86", "sm89", "sm100", "sm110"])
def test_no_loop_of_attention_has_local_memory(arch):
    blocks = ("64x64", "64x128", "128x64", "128x128")
    found = variants("--arch", arch, "--dtype", "bf16", "fp16", "--kernel", *ATTENTION, "--blocks", *blocks)
    assert [v for v in found if v["local_in_loops"]] == []


PTXAS = """#!/bin/sh
for of in "$@"; do case $of in *.ptx) grep -q bf16 "$of" && echo "no bf16 today" >&2 && exit 1;; esac; done
exec "{}" "$@"
"""


def test_what_cannot_be_compiled_is_a_row_of_its_own(tmp_path):
    """A compiler that rejects bf16 represents whatever may go wrong with one variant."""
    from triton import knobs

    file = tmp_path / "ptxas"
    file.write_text(PTXAS.format(knobs.nvidia.ptxas.path))
    file.chmod(0o755)
    options = (
        "--arch",
        "sm80",
        "--kernel",
        "sum-tokens",
        "--head-dim",
        "64",
        "--dtype",
        "bf16",
        "fp32",
        "--jobs",
        "1",
    )
    compiled, rejected = sorted(
        variants(*options, status=1, TRITON_PTXAS_PATH=str(file)), key=lambda v: v["dtype"], reverse=True
    )
    assert rejected["failed"]
    assert rejected["remark"].startswith("failed: ")
    assert "registers" not in rejected
    assert (compiled["dtype"], compiled["remark"], compiled["products"]) == ("fp32", "no tensor cores", None)
    assert compiled["registers"] > 0


@pytest.mark.long
def test_a_compiler_that_ends_its_process_costs_only_its_variant(tmp_path):
    from triton import knobs

    file = tmp_path / "ptxas"
    killing = 'grep -q bf16 "$of" && kill -9 $PPID;; esac; done'
    file.write_text(
        f'#!/bin/sh\nfor of in "$@"; do case $of in *.ptx) {killing}\nexec "{knobs.nvidia.ptxas.path}" "$@"\n'
    )
    file.chmod(0o755)
    options = ("--arch", "sm80", "--kernel", "sum-tokens", "--head-dim", "64", "--jobs", "1")
    found = {v["dtype"]: v for v in variants(*options, status=1, TRITON_PTXAS_PATH=str(file))}
    assert [dtype for dtype, v in found.items() if "failed" in v] == ["bf16"]
    assert found.keys() == {"bf16", "fp16", "fp32"}


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
from scripts.checks.machine_code.records import examined

change = "the same, index carried from step to step"
variants.triton_attention = without(change, pathlib.Path(sys.argv[1])).triton_attention
print(json.dumps(examined(variants.Variant("triton", 90, 64, 64))))
"""


def test_an_index_carried_from_step_to_step_would_be_found(tmp_path):
    """The fault that this file is here to find: it switched pipelining off, and serialised the products."""
    command = [sys.executable, "-c", CARRIED, str(tmp_path)]
    done = run(command, env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tile_distance"] == 0
    assert found["serialised"]
