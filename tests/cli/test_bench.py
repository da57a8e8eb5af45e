"""`dbsp bench`: fits recover known constants, and what it writes is what runs use."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from dbsp_cli.commands import bench
from dbsp_cli.commands.bench import KernelResult, Measured, Workload, compare_kernels, fit, measure
from dbsp_core import SequenceGroup, make_plan
from dbsp_core.cost.machine import device_class, kernel_order, load_hardware, measured_file, save_hardware
from dbsp_core.reports.page import ON_CPU
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS, choose_kernel
from tests.support.generators import SEEDS, examples

CPU = torch.device("cpu")


class TestFit:
    @given(SEEDS, st.integers(1, 3))
    @examples(60)
    def test_it_finds_the_coefficients_of_0_and_more_with_least_relative_errors(self, seed, count):
        """Compares with scipy's solver; without that bound, some of the best ones are negative."""
        rng = np.random.default_rng(seed)
        unit = 10.0 ** rng.integers(-6, 7, count)
        columns = rng.uniform(1, 9, (12, count))
        given = rng.uniform(0, 0.5, 12)
        seconds = columns @ rng.uniform(0, 5, count) * rng.uniform(0.5, 2, 12) + given
        found, error = fit(columns * unit, seconds, given)
        expected, _ = nnls(columns / seconds[:, None], 1 - given / seconds)
        assert np.array(found) * unit == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert error == pytest.approx(np.abs((columns @ expected + given) / seconds - 1).max())


def test_exact_kernels_are_ordered_by_speed_and_their_rates_are_kept_by_blocks():
    exact = {"error": 1e-4, "exact": True}
    found = [
        KernelResult("triton", (128, 64), **exact, flops_per_s=1e14),
        KernelResult("fa4", (128, 64), "it supports blocks of 128×128, got 128×64"),
        KernelResult("triton", (128, 128), **exact, flops_per_s=2e14),
        KernelResult("fa4", (128, 128), **exact, flops_per_s=4e14),
        KernelResult("sparge", (128, 64), error=0.1, flops_per_s=9e14),
        KernelResult("sparge", (128, 128), **exact, flops_per_s=8e14),
    ]
    others = load_hardware("cpu-demo")
    work = KnownTimes(4, 16, 256, (128, 64), torch.float32, CPU, SequenceGroup.from_group())
    dense_s = 4 * 4 * 256**2 * 16 / 5e14  # 5e14 FLOP/s
    hardware = Measured(others, others.constants, found, dense_s).hardware("here", work)
    assert hardware.exact_kernels == ("fa4", "triton"), "sparge was wrong once"
    rates = {name: kernel.flops_by_blocks for name, kernel in hardware.kernels.items()}
    assert rates == {"triton": {"128x128": 2e14}, "fa4": {"128x128": 4e14}, "sparge": {"128x128": 8e14}}
    assert {kernel.head_dim for kernel in hardware.kernels.values()} == {16}
    assert hardware.constants.dense_flops_per_s == pytest.approx(5e14)
    assert hardware.with_kernel("fa4").break_even(128, 128, 16, 10**9) == pytest.approx(0.8, rel=1e-3)
    assert {kernel.source for kernel in hardware.kernels.values()} == {"measured"}
    assert hardware.sources["flops_per_s"] == others.sources["flops_per_s"]


class TestKernelAuto:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.delenv("DBSP_KERNEL", raising=False)

    def written(self, **changes):
        here = replace(
            load_hardware("cpu-demo"), device=device_class("cpu"), exact_kernels=("fa4", "reference", "old")
        )
        save_hardware(measured_file("cpu"), replace(here, **changes))

    def test_it_takes_the_measured_order_and_then_its_own(self):
        assert kernel_order("auto", None, CPU) == "auto"
        self.written()
        assert kernel_order("auto", None, CPU) == "fa4,reference,auto"
        assert choose_kernel("fa4,reference,auto", "cpu", torch.float32).name == "reference"
        assert choose_kernel("fa4,auto", "cpu", torch.float32).name == "cpu"

    def test_a_named_kernel_and_the_environment_come_first(self, monkeypatch):
        self.written()
        assert kernel_order("cpu", None, CPU) == "cpu"
        monkeypatch.setenv("DBSP_KERNEL", "cpu")
        assert kernel_order("auto", None, CPU) == "auto"

    def test_what_was_measured_on_another_device_counts_for_nothing(self):
        self.written(device="NVIDIA H100 80GB HBM3")
        assert kernel_order("auto", None, CPU) == "auto"
        assert kernel_order("auto", "h100", CPU) == "auto"


def test_one_process_measures_and_writes_where_runs_look(dbsp, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(bench, "_ON_CPU", (2, 256))
    code, out, err = dbsp("bench", "tiny-wan", "--json")
    assert code == 0, err
    assert err.endswith(f"wrote {measured_file('cpu')}\n")
    assert "exchange rates are those of cpu-demo, not measured" in err
    assert f"dbsp: {ON_CPU}\n" in err
    report = json.loads(out)
    assert (report["ranks"], report["file"]) == (1, str(measured_file("cpu")))
    (cpu,) = report["kernels"]
    assert (cpu["kernel"], cpu["exact"], cpu["problem"]) == ("cpu", True, None)
    assert cpu["error"] < 1e-5
    assert cpu["flops_per_s"] > 1e6
    hardware = load_hardware(measured_file("cpu"))
    assert hardware.exact_kernels == ("cpu",)
    assert hardware.sources["flops_per_s"] == "measured"
    assert hardware.sources["exchange_bytes_per_s"] == load_hardware("cpu-demo").sources["exchange_bytes_per_s"]
    assert kernel_order("auto", None, CPU) == "cpu,auto"
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], approximates=True))
    work = Workload(2, 16, 256, (32, 16), torch.float32, CPU, SequenceGroup.from_group(), repeats=1)
    (approximate,) = compare_kernels(work, work.blocks)
    assert approximate.error < 1e-5
    assert not approximate.exact


class KnownTimes(Workload):
    """Rows that take 1 ms each if they have blocks, and packing 1 s a GB; nothing is run."""

    kernel = "triton"

    def medians(self, actions):
        if len(actions) == 3:  # attentions without active blocks, of all tokens, half and a quarter
            plans = [make_plan(self.mask(self.heads, 0.0, self.tokens // n), "U1R1", "contiguous") for n in (1, 2, 4)]
            bytes_a_second = replace(load_hardware("cpu-demo").constants, pack_bytes_per_s=1e9)
            return np.array([self.predicted(plan, bytes_a_second).pack_s for plan in plans])
        rows = [
            action.func.__self__ for action in actions if isinstance(getattr(action.func, "__self__", 0), bench.Rows)
        ]
        seconds = [row.flops / 1e9 + len(row.q) * 1e-3 for row in rows]
        return np.array([*seconds, *[1.0] * (len(actions) - len(rows))])


def test_rows_without_blocks_are_not_taken_for_rows_that_have_some():
    work = KnownTimes(4, 16, 256, (32, 16), torch.float32, CPU, SequenceGroup.from_group())
    found = measure(work, load_hardware("cpu-demo")).constants
    assert found.row_s == pytest.approx(1e-3, rel=1e-3)
    assert found.pack_bytes_per_s == pytest.approx(1e9, rel=1e-3)


def measure_tiny(rank: int, world: int) -> dict[str, Any]:
    """Returns main numbers of a measurement on gloo ranks."""
    group = SequenceGroup.from_group()
    work = Workload(4, 16, 256, (32, 16), torch.float32, CPU, group, sizes=(12, 16), repeats=2)
    found = measure(work, load_hardware("cpu-demo"))
    runs = [(run["strategy"], run["planner"]) for run in found.attentions]
    return {"runs": runs, "constants": vars(found.constants), "residual": found.residual}


def test_two_ranks_measure_exchanges_and_both_strategies(pool):
    one, other = pool(2).run(measure_tiny)
    assert one == other, "all ranks know the same"
    assert one["runs"] == [
        ("U2R1", "contiguous"),
        *((strategy, planner) for strategy in ("U2R1", "U1R2") for planner in ("contiguous", "dbsp")),
    ]
    assert all(np.isfinite(value) for value in one["constants"].values() if value is not None)
    assert 0 <= one["constants"]["overlap"] <= 1
    assert set(one["residual"]) == {"compute", "exchange", "p2p", "call"}


def test_ranks_that_srun_has_started_are_joined(mistake, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # restored after the test
    for name, value in {"PROCID": "1", "STEP_NUM_TASKS": "2", "LOCALID": "1", "STEP_TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)

    def join(device):
        raise UserError(f"joins as {os.environ['RANK']} of {os.environ['WORLD_SIZE']}")

    monkeypatch.setattr("dbsp_diffusers.rank_program.process_group", join)
    assert mistake("bench", "tiny-wan", "--out", tmp_path / "here.yaml") == "dbsp: error: joins as 1 of 2\n"
