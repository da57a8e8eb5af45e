"""Calibration: fits recover known constants, quiet repetitions are distinguished, and the command runs."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
import yaml

from dbsp_core import Strategy
from dbsp_core.cost.machine import RECORDED, Constants, hardware_for, load_hardware, measured_file
from dbsp_core.cost.prediction import MERGE_BYTES
from scripts.bench.attention import Comparison, core_seconds
from scripts.calibrate import __main__ as command
from scripts.calibrate.calibrate import (
    COMMUNICATION,
    Calibration,
    Checked,
    constants_from,
    predict_case,
    with_communication_of,
)
from scripts.calibrate.cases import Case, held_out, sizes_for
from scripts.calibrate.fit import fit
from scripts.calibrate.timing import Timer, median_time, run_ranks, undisturbed_samples
from tests.scripts.calibration_cases import die_on_one, fail_on_one

RECORD = {"versions": {"kernel": "cpu"}}


class TestFit:
    def test_it_finds_the_constants_that_made_the_times(self):
        columns = np.random.default_rng(0).uniform(1, 9, (12, 3)) * [1e6, 1.0, 1e-3]
        found = fit(columns, columns @ [2e-6, 0.5, 300.0])
        assert found.coefficients == pytest.approx((2e-6, 0.5, 300.0))
        assert found.residual == pytest.approx(0, abs=1e-9)

    def test_coefficients_are_never_negative(self):
        columns = np.array([[1.0, 1], [2, 1], [3, 1], [4, 1]])
        found = fit(columns, np.array([1.0, 2.9, 5.1, 7.0]))  # a line through (1, 1) of slope 2 cuts below zero
        assert found.coefficients[1] == 0
        assert 1 < found.coefficients[0] < 2

    def test_what_is_explained_already_is_left_out(self):
        columns = np.array([[1.0], [2], [3]])
        found = fit(columns, np.array([5.0, 7, 9]), given=np.full(3, 3.0))
        assert found.coefficients == pytest.approx((2.0,))
        assert found.residual == pytest.approx(0, abs=1e-12)

    def test_relative_errors_count_not_seconds(self):
        found = fit(np.array([[1.0], [1000.0]]), np.array([1.1, 900.0]))
        assert found.errors == pytest.approx(np.array([1 / 1.1, 1000 / 900]) * found.coefficients[0] - 1)
        assert found.coefficients[0] == pytest.approx((1 / 1.1 + 1 / 0.9) / (1 / 1.1**2 + 1 / 0.9**2))

    @pytest.mark.parametrize("seconds", [[1.0], [1.0, 0.0]])
    def test_too_few_samples_and_times_that_cannot_be_are_refused(self, seconds):
        with pytest.raises(ValueError, match="measure more sizes"):
            fit(np.ones((len(seconds), 2)), np.array(seconds))


def test_calibration_recovers_the_constants_that_made_the_times():
    sizes = sizes_for("cpu", quick=False)
    known = replace(
        load_hardware("cpu-demo").constants,
        flops_per_s=5e10,
        score_s=2e-10,
        row_s=3e-5,
        launch_s=1e-4,
        call_s=2e-3,
        pack_bytes_per_s=3e9,
        merge_bytes_per_s=8e9,
        exchange_latency_s=2e-4,
        exchange_bytes_per_s=2e9,
        p2p_latency_s=1e-4,
        p2p_bytes_per_s=1e9,
        overlap=0.4,
        linear_flops_per_s=9e10,
        serial_s=0.0,
        network_latency_s=None,  # one node is measured
        network_bytes_per_s=None,
    )

    def kernel_s(case):
        mask = case.mask()
        scores = int(mask.bits.sum()) * case.block**2
        return scores * (4 * case.head_dim / 5e10 + 2e-10) + case.heads * mask.grid.nq * 3e-5 + 1e-4

    def attention_s(case, strategy):
        return predict_case(case, Strategy.parse(strategy), "contiguous", known, "float32").total_s

    seconds = {
        "compute": [kernel_s(case) for case in sizes.compute],
        "merge": [1e-5 + n * MERGE_BYTES / 8e9 for n in sizes.merges],
        "linear": [2 * rows * width**2 / 9e10 for rows, width in sizes.linear],
        "exchange": [2e-4 + size / 2e9 for size in sizes.transfers],
        "p2p": [1e-4 + size / 1e9 for size in sizes.transfers],
        "call": [attention_s(case, "U2R1") for case in sizes.call],
        "overlap": [attention_s(case, "U1R2") for case in sizes.overlap],
    }
    found, fits = constants_from(sizes, {part: np.array(s) for part, s in seconds.items()}, 2, "float32")
    for f in fields(Constants):
        value = getattr(known, f.name)
        assert getattr(found, f.name) == (value if value is None else pytest.approx(value, rel=1e-5)), f.name
    assert all(one.residual < 1e-6 for one in fits.values())


def test_communication_of_another_machine_keeps_its_labels():
    both = with_communication_of(load_hardware("cpu-demo"), load_hardware("h200"))
    for name in COMMUNICATION:
        assert getattr(both.constants, name) == getattr(load_hardware("h200").constants, name)
        assert both.sources[name] == load_hardware("h200").sources[name]
    assert both.constants.flops_per_s == load_hardware("cpu-demo").constants.flops_per_s
    assert both.sources["flops_per_s"] == "measured"


def test_shapes_held_out_are_no_samples():
    sizes = sizes_for("cpu", quick=False)
    shapes = [{(c.tokens, c.head_dim, c.density) for c in group} for group in (sizes.compute, held_out("cpu", False))]
    assert not shapes[0] & shapes[1]


BUSY = [[(1.0, 0.0, 0.9), (9.0, 8.0, 0.9), (1.2, 0.01, 1.0)], [(1.1, 0.0, 0.8), (8.0, 0.0, 0.8), (1.0, 0.04, 0.7)]]
"""Samples of two ranks, the first of which lost its core in the second repetition."""


class TestClock:
    def test_repetitions_in_which_a_rank_lost_its_core_are_left_out(self):
        many = [one[:1] * 3 + one for one in BUSY]
        assert undisturbed_samples(many).tolist() == [1.1, 1.1, 1.1, 1.1, 1.2]

    def test_the_three_most_quiet_stand_where_there_are_fewer(self):
        assert sorted(undisturbed_samples(BUSY)) == [1.1, 1.2, 9.0]
        assert median_time([[BUSY[0]], [BUSY[1]]]).tolist() == [1.2]

    def test_seconds_on_a_core_are_the_busiest_ranks(self):
        assert core_seconds(BUSY) == 0.9

    def test_every_repetition_is_a_sample_and_warming_up_is_not(self):
        calls = []
        samples = Timer("cpu").samples(lambda: calls.append(1), repeats=4, warm_up=2)
        assert (len(samples), len(calls)) == (4, 6)
        assert all(seconds > 0 and waited >= 0 for seconds, waited, _ in samples)


class TestComparison:
    def test_the_speed_up_is_set_against_the_ratio_of_imbalances(self):
        one = Comparison(
            "U2R1", rho_before=1.5, rho=1.2, seconds_before=3.0, seconds=2.0, core_seconds_before=3.0, core_seconds=1.5
        )
        assert (one.speedup, one.expected, one.reached) == (1.5, 1.25, 1.2)
        record = one.record()
        assert {"strategy", "rho_before", "rho", "seconds_before", "seconds", "speedup"} <= set(record)


@pytest.mark.parametrize(
    ("function", "complaint"), [(fail_on_one, "the second rank's own fault"), (die_on_one, "rank 1 ended")]
)
def test_a_rank_that_fails_or_dies_is_reported(function, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        run_ranks(function, 2, "cpu")


@pytest.fixture
def calibration(capsys):
    """calibration(*args) runs the program. Returns exit code, standard output, standard error."""

    def run(*args):
        capsys.readouterr()
        try:
            command.main([str(arg) for arg in args])
        except SystemExit as stopped:
            return stopped.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--ranks", "1"], "--communication h200"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--kernel", "flash9"], "unknown kernel 'flash9'"),
        (["--communication", "a900"], "no hardware 'a900'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(calibration, tmp_path, args, complaint):
    out = tmp_path / "x.yaml"
    code, said, err = calibration("--out", out, *args, "--json")
    assert (code, said, err.count("\n")) == (2, "", 1)
    assert complaint in err
    assert not out.exists()


def test_a_place_that_takes_nothing_is_refused_before_anything_is_measured(calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "calibrate", lambda *_, **__: pytest.fail("measured"))
    (tmp_path / "file").touch()
    code, _, err = calibration("--out", tmp_path / "file" / "x.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{tmp_path / 'file'} is a file, not a folder" in err


def test_without_a_file_the_program_writes_where_runs_look(calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    measured = partial(replace, load_hardware("cpu-demo"))
    monkeypatch.setattr(command, "calibrate", lambda name, *_, **__: Calibration(measured(name=name), {}, {}, RECORD))
    assert hardware_for(None, "cpu", "auto") is None
    code, _, err = calibration()
    assert (code, err.splitlines()[-1]) == (0, f"wrote {measured_file('cpu')}")
    assert hardware_for(None, "cpu", "auto") == measured(name=measured_file("cpu").stem)
    assert measured_file("cpu").is_relative_to(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    code, _, err = calibration()
    assert (code, "name another file with --out FILE" in err) == (2, True)


def test_the_program_measures_writes_and_checks(calibration, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_fault_of", lambda *_: None)  # how busy this machine is, is not tested here
    out = tmp_path / "here.yaml"
    code, text, _ = calibration("--quick", "--out", out, "--check", "--json")
    report = json.loads(text)
    assert code == 0
    hardware = load_hardware(out)
    assert report["hardware"]["constants"]["flops_per_s"] == hardware.constants.flops_per_s
    assert hardware.sources["p2p_bytes_per_s"] == "measured"
    written = yaml.safe_load(out.read_text())
    assert set(written["residuals"]) == {"compute", "merge", "linear", "exchange", "p2p", "call"}
    assert {name: report["hardware"][name] for name in RECORDED} == {name: written[name] for name in RECORDED}
    assert {one["strategy"] for one in report["held_out"]} == {"U2R1", "U1R2"}
    assert report["worst_error"] == max(abs(one["error"]) for one in report["held_out"])


@pytest.mark.parametrize(
    ("measured_s", "bytes_per_s", "fault"),
    [
        (1.4, 1e9, None),
        (2.5, 1e9, "wrong by up to 60%, more than 50%"),
        (0.5, 1e9, "wrong by up to 100%"),
        (1.0, float("inf"), "p2p_bytes_per_s came out infinite"),
    ],
)
def test_constants_that_fail_their_own_check_are_not_written(
    calibration, tmp_path, monkeypatch, measured_s, bytes_per_s, fault
):
    """Nothing is measured: a machine that was busy is made up."""
    known = load_hardware("cpu-demo")
    known = replace(known, constants=replace(known.constants, p2p_bytes_per_s=bytes_per_s))
    monkeypatch.setattr(command, "calibrate", lambda *_, **__: Calibration(known, {}, {}, RECORD))
    held = [Checked(Case(2, 128, 16, 0.5), "U2R1", "dbsp", measured_s, 1.0)]
    monkeypatch.setattr(command, "check", lambda *_, **__: held)
    out = tmp_path / "here.yaml"
    code, said, err = calibration("--out", out, "--check", "--json")
    assert json.loads(said)["worst_error"] == pytest.approx(abs(1 / measured_s - 1))
    assert out.exists() is (fault is None)
    if fault is None:
        assert (code, err) == (0, f"wrote {out}\n")
    else:
        assert code == 2
        assert err.startswith(f"error: {out} is not written: ")
        assert fault in err
        assert "--patience" in err
        assert err.count("\n") == 1
