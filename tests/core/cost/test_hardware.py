"""Hardware files: read strictly, written whole, and labelled."""

from __future__ import annotations

import csv
import statistics
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.cost.machine import RECORDED, SHIPPED, Constants, load_hardware, save_hardware
from dbsp_core.cost.prediction import AttentionShape, predict
from dbsp_core.cost.sequence_cost import LayerSize, sequence_cost
from dbsp_core.utils.schema import convert
from dbsp_kernels.triton.launch import triton_version
from dbsp_kernels.triton.tiles import tiles_for

NAMES = sorted(path.stem for path in SHIPPED.glob("*.yaml"))


@pytest.mark.parametrize("name", NAMES)
def test_shipped_file_has_a_source_for_each_constant(name):
    hardware = load_hardware(name)
    assert hardware.name == name
    given = {f.name for f in fields(Constants) if getattr(hardware.constants, f.name) is not None}
    of_gpu = set() if name == "cpu-demo" else {"multiprocessors", "capability"}
    assert set(hardware.sources) == given | {"gpus_per_node"} | of_gpu
    assert all(getattr(hardware, key) is not None for key in of_gpu)
    assert set(hardware.sources.values()) <= {"measured", "fitted", "published", "derived", "assumed"}
    assert {"network_latency_s", "network_bytes_per_s"} <= given
    assert hardware.gpus_per_node == 8
    record = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    assert record["notes"]
    assert ("date" in record) == (name in ("cpu-demo", "h200")), "only what was measured has a date"


def test_slots_of_a_gpu_are_known_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_version.cache_clear(), tiles_for.cache_clear()
    assert triton_version() is None
    assert load_hardware("h100").row_slots(128, 64, 128) == 132
    triton_version.cache_clear(), tiles_for.cache_clear()


def test_written_file_is_read_back_equal(tmp_path):
    hardware = load_hardware("cpu-demo")
    hardware = replace(hardware, constants=replace(hardware.constants, pack_bytes_per_s=float("inf")))
    record = dict.fromkeys(RECORDED, "ρ_s, and a\nsecond line")
    save_hardware(tmp_path / "new" / "mine.yaml", hardware, record)
    assert load_hardware(tmp_path / "new" / "mine.yaml") == hardware
    assert yaml.safe_load((tmp_path / "new" / "mine.yaml").read_text()).items() >= record.items()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine.yaml"]


def changed(tmp_path, changes, name="a800") -> str:
    """Returns the path of a copy of a shipped file with changed values; None removes one."""
    values = yaml.safe_load((SHIPPED / f"{name}.yaml").read_text())
    for key, change in changes.items():
        values[key] = values.get(key, {}) | change if isinstance(change, dict) else change
    for mapping in [values, *(value for value in values.values() if isinstance(value, dict))]:
        for key in [key for key, value in mapping.items() if value is None]:
            del mapping[key]
    path = tmp_path / "changed.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def constants(**changes):
    return {"constants": changes}


def sparge(**constants):
    return {"kernels": {"sparge": {"source": "fitted"} | constants}}


MISTAKES = {
    "unknown key 'devise'.*did you mean 'device'": {"devise": "x"},
    "unknown key 'flop_per_s' in 'constants'.*did you mean 'flops_per_s'": constants(flop_per_s=1.0),
    "'constants' lacks row_s; add what is missing": constants(row_s=None),
    "the file lacks sources": {"sources": None},
    "'flops_per_s' in .* must be float, got 'fast'": constants(flops_per_s="fast"),
    "yaml:[0-9]+: hardware constant flops_per_s=nan must be positive": constants(flops_per_s=float("nan")),
    "overlap=2.0 must lie between 0 and 1": constants(overlap=2),
    "network_latency_s and network_bytes_per_s go together": constants(network_latency_s=None),
    "yaml:[0-9]+: gpus_per_node=0 must be a number of GPUs": {"gpus_per_node": 0},
    "lacks source": {"kernels": {"sparge": {"flops_per_s": 5e14}}},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistake_raises_with_a_fix(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        load_hardware(changed(tmp_path, MISTAKES[message]))


def test_constants_of_a_kernel_override_those_of_the_machine(tmp_path):
    hardware = load_hardware(changed(tmp_path, sparge(flops_per_s=5e14, score_s=1e-12), "h100"))
    merged = hardware.with_kernel("sparge")
    assert (merged.constants.flops_per_s, merged.constants.score_s) == (5e14, 1e-12)
    assert merged.constants.launch_s == hardware.constants.launch_s
    assert (merged.sources["flops_per_s"], merged.sources["launch_s"]) == ("fitted", "assumed")
    assert hardware.with_kernel("triton") == hardware


@pytest.mark.parametrize("number", ["1e9", "1.5e9", "-2E-3"])
def test_numbers_with_an_exponent_are_read_that_yaml_takes_for_text(number):
    assert yaml.safe_load(number) == number
    assert convert(number, float | None, "a number") == float(number)
    with pytest.raises(ValueError, match="must be float, got"):
        convert(f"{number}x", float, "a number")


def test_rate_of_a_kernel_depends_on_its_blocks(tmp_path):
    kernels = {"fa4": {"flops_by_blocks": {"128x128": 5e14, "64x64": 2e14}, "source": "measured"}}
    given = {"kernels": kernels, "exact_kernels": ["fa4", "triton"]}
    hardware = load_hardware(changed(tmp_path, given, "h100"))
    fa4 = hardware.with_kernel("fa4")
    assert hardware.with_kernel("auto") == fa4, "the fastest"
    assert hardware.with_kernel("triton") == hardware
    assert [fa4.at_blocks(size, size).flops_per_s for size in (128, 64)] == [5e14, 2e14]
    assert fa4.at_blocks(128, 64) == hardware.constants == hardware.at_blocks(128, 128)
    assert fa4.fingerprint != hardware.fingerprint
    save_hardware(tmp_path / "again.yaml", hardware)
    assert load_hardware(tmp_path / "again.yaml") == hardware
    plan = make_plan(BlockMask.dense(2, BlockGrid.uniform(1024, 64)), "U1R1")
    slow, fast = (predict(plan, AttentionShape(1, 2, 64), one).attention_s for one in (fa4, hardware))
    assert slow > fast
    slow, fast = (sequence_cost(LayerSize(2, 64, 1e6), one, 64, 64).block_s for one in (fa4, hardware))
    assert slow > fast


@pytest.mark.parametrize(("tokens", "kernel"), [(6_000, "triton"), (75_600, "sparge")])
def test_break_even_is_where_both_ways_take_as_long(tokens, kernel):
    """Adds up seconds of one head: prediction and active blocks, and all blocks on the dense kernel."""
    hardware = load_hardware("h200").with_kernel(kernel)
    for block_q, block_k in ((64, 64), (128, 64), (128, 128)):
        known = hardware.at_blocks(block_q, block_k)
        density = hardware.break_even(block_q, block_k, 128, tokens)
        active_s = density * tokens**2 * (4 * 128 / known.flops_per_s + known.score_s)
        assert 4 * 128 * tokens**2 / known.dense_flops_per_s == pytest.approx(active_s + 2.76e-9 * tokens)
        assert density < known.flops_per_s / known.dense_flops_per_s
    assert load_hardware("cpu-demo").break_even(64, 64, 128, tokens) is None


def test_dense_attention_takes_its_own_rate():
    hardware = load_hardware("h200").with_kernel("triton")
    plan = make_plan(BlockMask.dense(8, BlockGrid.uniform(8192, 64)), "U1R1")
    sparse, dense = (
        predict(plan, AttentionShape(1, 8, 128), machine).attention_s - machine.constants.launch_s
        for machine in (hardware, hardware.with_dense_attention())
    )
    assert dense == pytest.approx(8 * 4 * 128 * 8192**2 / 6.351e14)
    assert sparse > dense * 6.351e14 / 5.689e14 * (1 - 1e-9)
    assert load_hardware("cpu-demo").with_dense_attention() == load_hardware("cpu-demo"), "not known"


IN_USE = {"64×64": "scale_first, 64 queries", "128×64": "scale_first, 64 queries", "128×128": "plain, 128 queries"}
"""The variant of the block kernel that runs on Hopper's, by blocks (docs/kernels.md)."""


def test_rates_of_the_h200_are_measured_ones():
    table = Path(__file__).parents[3] / "docs" / "results" / "gpu-h200.csv"
    with table.open() as lines:
        rows = {(row["case"], row["what"]): float(row["value"]) for row in csv.DictReader(lines) if row["value"]}
    hardware, dense = load_hardware("h200"), []
    for blocks, variant in IN_USE.items():
        case, size = f"14B, {blocks}, D 128, bfloat16", blocks.replace("×", "x")
        dense.append(rows[case, "dense, cudnn, beside density 1.0"])
        for kernel, what in {"triton": variant, "triton-int8": "triton-int8"}.items():
            rate = hardware.kernels[kernel].flops_by_blocks[size]
            assert rate == pytest.approx(1e12 * rows[case, f"{what}, density 1.0"], rel=1e-3)
            assert hardware.kernels[kernel].head_dim == 128
    assert hardware.constants.dense_flops_per_s == pytest.approx(1e12 * statistics.median(dense), rel=1e-3)
    for video, heads, tokens in (
        ("Wan2.1-14B, 81 frames of 1280 × 720", 5, 75_600),
        ("Wan2.1-1.3B, 81 frames of 832 × 480", 1.5, 32_760),
    ):
        measured_s = rows[f"{video}, U8R1, predicted", "of it prediction"] / 1e3
        assert load_hardware("h200").constants.predict_s * heads * tokens == pytest.approx(measured_s, rel=0.02)
