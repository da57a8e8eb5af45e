"""Machine code that the installed Triton makes of the kernels, in all shapes of shipped configurations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

pytest.importorskip("triton")
from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS, TINY, TINY_MODELS
from dbsp_core.sources import SOURCES, MaskRequest
from dbsp_core.utils.yaml_file import shipped_configs
from scripts.checks.machine_code.reading import is_serialised
from scripts.checks.machine_code.tritons import TRITONS, folder_of
from scripts.checks.machine_code.variants import ATTENTION, DTYPES, KERNELS, SHIPPED

FIELDS = {
    "kernel", "arch", "block_q", "block_k", "head_dim", "dtype", "case", "triton", "tile_distance", "products",
    "products_of_int8", "waits", "in_flight", "serialised", "registers", "spills", "shared_bytes",
    "programs_per_multiprocessor", "stack",
    "local_accesses", "local_in_loops", "remark",
}  # fmt: skip


def without_interpreter() -> dict[str, str]:
    return {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}


def variants(*options: str, status: int = 0, **environment: str) -> list[dict]:
    command = [sys.executable, "-m", "scripts.checks.machine_code", *options]
    environment |= without_interpreter()
    done = run(command, env=environment, cwd=ROOT)
    assert done.returncode == status, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SPILLED_ONCE_A_ROW = {"128x128": 64, "120x120": 160}
"""Most bytes per thread that the forward kernel spills outside its loops."""


BLOCKS = ("64x64", "120x120", "64x128", "128x64", "128x128")


@pytest.mark.long
def test_hopper_code_fetches_tiles_ahead_overlaps_products_and_spills_nothing():
    found = variants("--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", "--jobs", "1", "--blocks", *BLOCKS)
    assert {f"{v['block_q']}x{v['block_k']}" for v in found} == set(BLOCKS)
    for v in found:
        assert v.keys() >= FIELDS
        shape = f"{v['block_q']}x{v['block_k']}"
        if v["kernel"] == "triton" and shape in SPILLED_ONCE_A_ROW:
            assert (v["local_in_loops"], v["spills"] <= SPILLED_ONCE_A_ROW[shape]) == (0, True), v
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
        if 64 in (v["block_q"], v["block_k"]) and v["kernel"] == "triton":
            assert v["programs_per_multiprocessor"] == 2, f"one's softmax hides behind the other's products: {v}"


def assert_hopper_code_overlaps_products(version: str, *options: str) -> None:
    """Reads bf16 code of D 128 that another Triton makes, which is installed first if it is not there."""
    try:
        folder_of(version)
    except RuntimeError as error:
        pytest.skip(f"Triton {version} cannot be installed: {error}")
    found = variants("--triton", version, "--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", *options)
    assert len(found) >= 3
    for v in found:
        assert v["triton"] == version
        assert not v["serialised"], v
        assert v["waits"] <= 6 < v["products"], v
        assert v["tile_distance"] >= 2, v
        assert (v["local_in_loops"], v["shared_bytes"] <= 227 << 10) == (0, True), v


def test_hopper_code_overlaps_products_under_triton_3_6():
    """Triton 3.6, which torch 2.10 and 2.11 bring, serialises products of the loop `late`."""
    options = ("--kernel", "triton", "--case", "", "--jobs", "1", "--blocks", "64x64", "128x64", "128x128")
    assert_hopper_code_overlaps_products("3.6.0", *options)


@pytest.mark.long
@pytest.mark.parametrize("version", TRITONS)
def test_hopper_code_overlaps_products_under_every_triton(version):
    assert_hopper_code_overlaps_products(version, "--kernel", *ATTENTION, "--blocks", *BLOCKS)


SHARED = {"sm80": 99 << 10, "sm90": 227 << 10, "sm120": 99 << 10}
"""Most shared memory of a program; 99 KB is that of the smallest GPUs since sm80."""


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "kernels"), [("bf16", ATTENTION), ("fp32", ("triton",))])
@pytest.mark.parametrize("arch", SHARED)
def test_every_shipped_shape_fits_the_smallest_gpus_and_registers(arch, dtype, kernels):
    found = variants("--arch", arch, "--dtype", dtype, "--kernel", *kernels)
    assert {(v["block_q"], v["block_k"], v["head_dim"]) for v in found} == set(SHIPPED)
    for v in found:
        assert v["shared_bytes"] <= SHARED[arch], v
        if dtype == "bf16":
            assert v["local_in_loops"] == 0, v
            if min(v["block_q"], v["block_k"], v["head_dim"]) >= 64:  # tiny blocks need no tiles ahead
                assert v["tile_distance"] >= 1, v
                assert not v["serialised"], v


OTHERS = (
    *("sum-tokens", "pool-rows", "scores", "select", "merge", "copy", "copy-to-both", "quantise", "quantise-blocks"),
    *("expand-rows", "pack-rows"),
)


def test_every_kernel_is_compiled_for_sm80():
    """Compiles one head size of each: Triton's interpreter runs code that its compiler rejects."""
    options = ("--arch", "sm80", "--dtype", "bf16", "--jobs", "1")
    found = variants(*options, "--kernel", *ATTENTION, "--blocks", "64x64", "--head-dim", "64")
    found += variants(*options, "--kernel", *OTHERS, "--head-dim", "128", "0")
    assert {v["kernel"] for v in found} == {*ATTENTION, *OTHERS} == set(KERNELS)
    assert [v for v in found if v["local_in_loops"]] == []


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm80", "sm86", "sm90", "sm120"])
def test_loops_without_tensor_cores_use_registers_alone(arch):
    """Guards against a form of one loop from which Triton 3.9 makes code with 5.8 KB of a thread's memory."""
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


def with_broken_compiler(folder: Path, fault: str, *dtypes: str) -> dict[str, dict]:
    """Returns variants by dtype from a compiler that runs a shell command if it is given bf16."""
    from triton import knobs

    file = folder / "ptxas"
    look = f'for of in "$@"; do case $of in *.ptx) grep -q bf16 "$of" && {fault};; esac; done'
    file.write_text(f'#!/bin/sh\n{look}\nexec "{knobs.nvidia.ptxas.path}" "$@"\n')
    file.chmod(0o755)
    options = ("--arch", "sm80", "--kernel", "sum-tokens", "--head-dim", "64", "--jobs", "1", "--dtype", *dtypes)
    return {v["dtype"]: v for v in variants(*options, status=1, TRITON_PTXAS_PATH=str(file))}


@pytest.mark.long
def test_variant_that_cannot_be_compiled_has_a_row_of_its_own(tmp_path):
    found = with_broken_compiler(tmp_path, 'echo "no bf16 today" >&2 && exit 1', "bf16", "fp32")
    compiled, rejected = found["fp32"], found["bf16"]
    assert rejected["failed"]
    assert rejected["remark"].startswith("failed: ")
    assert "registers" not in rejected
    assert (compiled["remark"], compiled["products"]) == ("no tensor cores", None)
    assert compiled["registers"] > 0


@pytest.mark.long
def test_compiler_that_ends_its_process_costs_only_its_variant(tmp_path):
    found = with_broken_compiler(tmp_path, "kill -9 $PPID", "bf16", "fp16", "fp32")
    assert [dtype for dtype, v in found.items() if "failed" in v] == ["bf16"]
    assert found.keys() == {"bf16", "fp16", "fp32"}


def test_every_warning_of_serialised_products_counts():
    said = "ptxas info : (C{}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    assert all(is_serialised(said.format(code)) for code in (7510, 7514, 7515, 7519))
    assert not any(is_serialised(said.format(code)) for code in (7520, 751))


def test_index_carried_from_step_to_step_is_found(tmp_path):
    """Restores a fault that switched pipelining off and serialised the products."""
    command = [sys.executable, "-m", "tests.kernels.kernel_changes", str(tmp_path)]
    done = run(command, env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    sound, faulty = json.loads(done.stdout.splitlines()[-1])
    assert sound["tile_distance"] >= 2
    assert (sound["serialised"], sound["local_accesses"], sound["spills"]) == (False, 0, 0)
    assert faulty["tile_distance"] == 0
    assert faulty["serialised"]


FILES = sorted(shipped_configs().glob("*.yaml"))
TINY_THW = (9, 7, 13)
WITHOUT_DEFAULTS = {"file", "paro", "lowrank", "record_qk", "union", "callable"}
"""Sources that need a path, a function or parts."""


def head_dim_of(model: str) -> int:
    tiny = TINY_MODELS.get(model.removeprefix(TINY)) if model.startswith(TINY) else None
    return (tiny or MODEL_SPECS[model].signature).sizes[2]


def shape_of(source, model: str, thw: tuple[int, int, int]) -> tuple[int, int, int]:
    grid = source.grid(MaskRequest(0, 8, thw, layers=4))
    return grid.block_q, grid.block_k, head_dim_of(model)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shapes_of_shipped_configurations_are_compiled_by_tests(file):
    values = yaml.safe_load(file.read_text())
    if "path" in values["mask"]:
        pytest.skip("its blocks are those of a mask file that the user supplies")
    config, model = DbspConfig.load(file), values["model"]
    assert config.generate.torch_dtype in DTYPES.values()
    thw = TINY_THW if model.startswith(TINY) else MODEL_SPECS[model].thw
    assert shape_of(config.mask, model, thw) in SHIPPED


def test_default_blocks_of_every_source_are_compiled_for_every_model():
    sizes = {name: spec.thw for name, spec in MODEL_SPECS.items()}
    sizes |= dict.fromkeys((f"{TINY}{name}" for name in TINY_MODELS), TINY_THW)
    made = [source() for name, source in SOURCES.items() if name not in WITHOUT_DEFAULTS]
    shapes = {shape_of(source, model, thw) for source in made for model, thw in sizes.items()}
    assert shapes <= set(SHIPPED)
    assert {(64, 64, 128), (64, 64, 64), (64, 64, 24), (64, 64, 16)} <= shapes


WIDTHS = """
import re
from types import SimpleNamespace
from scripts.checks.machine_code.launches import compiled_launches
from scripts.checks.machine_code.variants import KERNELS
for name, case in (("copy", "blocks"), ("copy", "q, k, v"), ("copy-to-both", "")):
    of = SimpleNamespace(case=case, head_dim=128, dtype="bf16")
    (compiled,) = compiled_launches(lambda: KERNELS[name].launch(of), 90, "copy_kernel")
    print(name, sorted(set(re.findall(r"STG[.\\w]*", compiled.sass))))
"""


def test_copies_store_sixteen_bytes_at_a_time():
    done = run([sys.executable, "-c", WIDTHS], env=without_interpreter(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    stores = ["['STG.E.128']"] * 3
    assert [line.partition(" ")[2] for line in done.stdout.splitlines()] == stores, done.stdout
