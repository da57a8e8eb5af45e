"""scripts/checks/upstream: what runs other projects' tests with db-SP does so, and sees what differs."""

from __future__ import annotations

import pytest
import torch

import dbsp_diffusers
from scripts.checks.upstream.counting import COUNTED, attentions_counted
from scripts.checks.upstream.outcomes import Comparison, compare_outputs, outcomes_of, relative_difference
from scripts.checks.upstream.run_suites import run_suite
from scripts.checks.upstream.suites import Suite
from scripts.checks.upstream.switch import Outputs, install, known_classes
from scripts.checks.upstream.upstream_refs.finding import compared
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs


def call(enabled, model="wan"):
    """(output, what was kept): a test that makes a model and calls it."""
    kept = Outputs()
    kept.test = "a test"
    undo = install(known_classes(), enabled, kept)
    try:
        transformer = make_tiny_transformer(model)
        with torch.no_grad():
            out = transformer(**tiny_inputs(model))[0]
        assert (dbsp_diffusers.session_of(transformer) is not None) == enabled
    finally:
        undo()
    return out, kept


def test_a_model_that_a_test_makes_runs_with_dbsp_and_equals_stock(tmp_path, monkeypatch):
    counted = tmp_path / "counted"
    monkeypatch.setenv(COUNTED, str(counted))
    classes = [dict(vars(cls)) for cls in known_classes()]
    compile_before = torch.compile
    stock, without = call(enabled=False)
    assert attentions_counted(counted) == 0
    ours, kept = call(enabled=True)
    assert attentions_counted(counted) == 2
    assert relative_difference(stock, ours) <= 1e-5
    for mode, one in (("stock", without), ("dbsp", kept)):
        torch.save(one.values, tmp_path / mode)
    worst = relative_difference(stock, ours)
    assert compare_outputs(tmp_path / "stock", tmp_path / "dbsp") == Comparison(1, worst)
    assert [dict(vars(cls)) for cls in known_classes()] == classes
    assert torch.compile is compile_before


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (torch.tensor([1.0, 2.0]), 0.0),
        (torch.tensor([1.0, 2.1]), 0.05),
        (torch.tensor([1.0]), float("inf")),
        (torch.tensor([1.0, float("nan")]), float("inf")),
    ],
)
def test_differences_are_seen(other, expected):
    assert relative_difference(torch.tensor([1.0, 2.0]), other) == pytest.approx(expected)


def test_outcomes_are_read_from_the_report(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="a" name="fine"/>'
        '<testcase classname="a" name="left"><skipped message="needs   a GPU"/></testcase>'
        '<testcase classname="a" name="wrong"><failure message="1 is not 2"/></testcase>'
        '<testcase classname="a" name="ended badly"/>'
        '<testcase classname="a" name="ended badly"><error message="teardown"/></testcase>'
        "</testsuite></testsuites>"
    )
    assert outcomes_of(report) == {
        "a::fine": ("passed", ""),
        "a::left": ("skipped", "needs a GPU"),
        "a::wrong": ("failed", "1 is not 2"),
        "a::ended badly": ("failed", "teardown"),
    }


@pytest.mark.long
def test_a_project_imports_its_own_tests_by_package(tmp_path):
    pytest.importorskip("para_attn")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "from tests.helper import ANSWER\n\ndef test_answer():\n    assert ANSWER == 42\n"
    )
    suite = Suite("own", "para-attn", ("tests/test_it.py",), "a test that imports another file of its folder")
    outcomes = run_suite(suite, tmp_path, tmp_path, "stock", minutes=4)
    assert list(outcomes.values()) == [("passed", "")], (tmp_path / "own.stock.log").read_text()


def test_an_upstream_reference_counts_both_ways(tmp_path):
    found = compared("project", tmp_path, "masks", [[1, 1], [0, 0]], [[1, 0], [1, 1]])
    assert (found.compared, found.theirs_only, found.ours_only, found.equal) == (4, 1, 2, False)
    assert (found.density_theirs, found.density_ours) == (0.5, 0.75)
    assert compared("project", tmp_path, "masks", [True], [True]).equal
