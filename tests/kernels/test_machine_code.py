"""Machine code that the installed Triton makes of the kernels, in all shapes of shipped configurations."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from tests.support.programs import run
from tests.support.repository import ROOT, child_environment

pytest.importorskip("triton")
from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS, TINY, TINY_MODELS
from dbsp_core.sources import SOURCES, MaskRequest, SlaSource, SstaSource
from dbsp_core.utils.yaml_file import shipped_configs
from scripts.checks.machine_code.reading import is_serialised
from scripts.checks.machine_code.tritons import TRITONS, folder_of
from scripts.checks.machine_code.variants import ATTENTION, DTYPES, KERNELS, SHIPPED


def variants(*options: str) -> list[dict]:
    environment = {name: value for name, value in child_environment().items() if name != "TRITON_INTERPRET"}
    done = run([sys.executable, "-m", "scripts.checks.machine_code", *options], env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SPILLED_ONCE_A_ROW = {"128x128": 64, "120x120": 160}
"""Most bytes per thread that the forward kernel spills outside its loops."""


BLOCKS = ("64x64", "120x120", "64x128", "128x64", "128x128")


@pytest.mark.long
def test_hopper_code_fetches_tiles_ahead_overlaps_products_and_spills_nothing():
    found = variants("--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", "--jobs", "1", "--blocks", *BLOCKS)
    assert {f"{v['block_q']}x{v['block_k']}" for v in found} == set(BLOCKS)
    for v in found:
        shape = f"{v['block_q']}x{v['block_k']}"
        if v["kernel"] == "triton" and shape in SPILLED_ONCE_A_ROW:
            assert (v["local_in_loops"], v["spills"] <= SPILLED_ONCE_A_ROW[shape]) == (0, True), v
        else:
            assert (v["local_accesses"], v["stack"], v["spills"]) == (0, 0, 0), v
        assert v["tile_distance"] >= 2, f"tiles of keys and values are fetched while others are worked on: {v}"
        assert not v["serialised"], v
        assert v["waits"] <= 6 < v["products"], v
        assert (v["products_of_int8"] > 0) == (v["kernel"] == "triton-int8"), v
        assert v["fused"] >= v["exponentials"] - 2, f"scores are scaled, and less their maximum, in one step: {v}"
        assert v["shared_bytes"] <= 227 << 10, v
        if 64 in (v["block_q"], v["block_k"]) and v["kernel"] == "triton":
            assert v["programs_per_multiprocessor"] == 2, f"one's softmax hides behind the other's products: {v}"


@pytest.mark.long
@pytest.mark.parametrize("version", TRITONS)
def test_hopper_code_overlaps_products_under_every_triton(version):
    """Triton 3.6, which torch 2.10 and 2.11 bring, serialises products of the loop `late`."""
    try:
        folder_of(version)
    except RuntimeError as error:
        pytest.skip(f"Triton {version} cannot be installed: {error}")
    shapes = ("--kernel", *ATTENTION, "--blocks", *BLOCKS)
    found = variants("--triton", version, "--arch", "sm90", "--dtype", "bf16", "--head-dim", "128", *shapes)
    assert found
    for v in found:
        assert not v["serialised"], v
        assert v["waits"] <= 6 < v["products"], v
        assert v["tile_distance"] >= 2, v
        assert (v["local_in_loops"], v["shared_bytes"] <= 227 << 10) == (0, True), v


SHARED = {"sm80": 99 << 10, "sm86": 99 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "sm120": 99 << 10}
"""Most shared memory of a program; 99 KB is that of the smallest GPUs since sm80."""


@pytest.mark.long
@pytest.mark.parametrize("arch", SHARED)
def test_every_shipped_shape_fits_the_smallest_gpus_and_registers(arch):
    found = variants("--arch", arch, "--dtype", "bf16", "--kernel", *ATTENTION)
    assert {(v["block_q"], v["block_k"], v["head_dim"]) for v in found} == set(SHIPPED)
    for v in found:
        assert (v["local_in_loops"], v["shared_bytes"] <= SHARED[arch]) == (0, True), v
        if min(v["block_q"], v["block_k"], v["head_dim"]) >= 64:  # tiny blocks need no tiles ahead
            assert (v["tile_distance"] >= 1, v["serialised"]) == (True, False), v
    for v in variants("--arch", arch, "--dtype", "fp32", "--kernel", "triton"):
        assert v["shared_bytes"] <= SHARED[arch], v


OTHERS = tuple(name for name in KERNELS if name not in ATTENTION)


def test_every_kernel_is_compiled_for_sm80():
    """Compiles one launch of each: Triton's interpreter runs code that its compiler rejects."""
    first = dict.fromkeys(kernel.cases[0] for kernel in KERNELS.values())
    which = ("--blocks", "64x64", "0x0", "--head-dim", "64", "0", "--case", *first)
    found = variants("--arch", "sm80", "--dtype", "bf16", "--jobs", "1", *which)
    assert sorted(v["kernel"] for v in found) == sorted(KERNELS)
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


def test_every_warning_of_serialised_products_counts():
    said = "ptxas info : (C{}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to …"
    assert all(is_serialised(said.format(code)) for code in (7510, 7514, 7515, 7519))
    assert not any(is_serialised(said.format(code)) for code in (7520, 751))


FILES = sorted(shipped_configs().glob("*.yaml"))
TINY_THW = (9, 7, 13)
WITHOUT_DEFAULTS = {"file", "paro", "lowrank", "record_qk", "union", "callable"}
"""Sources that need a path, a function or parts."""


def shape_of(source, model: str) -> tuple[int, int, int]:
    tiny = TINY_MODELS.get(model.removeprefix(TINY)) if model.startswith(TINY) else None
    thw = TINY_THW if model.startswith(TINY) else MODEL_SPECS[model].thw
    grid = source.grid(MaskRequest(0, 8, thw, layers=4))
    return grid.block_q, grid.block_k, (tiny or MODEL_SPECS[model].signature).sizes[2]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shapes_of_shipped_configurations_are_compiled_by_tests(file):
    values = yaml.safe_load(file.read_text())
    if "path" in values["mask"]:
        pytest.skip("its blocks are those of a mask file that the user supplies")
    config = DbspConfig.load(file)
    assert config.generate.torch_dtype in DTYPES.values()
    model = values.get("model", "wan2.1-t2v-14b")  # files without one are for heads of 128
    assert shape_of(config.mask, model) in SHIPPED


def test_default_blocks_of_every_source_are_compiled_for_every_model():
    models = [*MODEL_SPECS, *(f"{TINY}{name}" for name in TINY_MODELS)]
    made = [source() for name, source in SOURCES.items() if name not in WITHOUT_DEFAULTS]
    of_tiny = [source for source in made if not isinstance(source, (SlaSource, SstaSource))]  # of large models
    shapes = {shape_of(source, model) for source in made for model in MODEL_SPECS}
    shapes |= {shape_of(source, model) for source in of_tiny for model in models}
    assert shapes <= set(SHIPPED)
    assert {(64, 64, 128), (64, 64, 64), (64, 64, 24), (64, 64, 16)} <= shapes
