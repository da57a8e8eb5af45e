"""The table of what engines' tests gave counts the cases of each test function by outcome."""

from __future__ import annotations

from scripts.checks.engines import tests_run

REPORT = """<testsuites><testsuite>
<testcase name="test_exact[U2R1]"/><testcase name="test_exact[U1R2]"><failure message="off"/></testcase>
<testcase name="test_exact[U2R2]"><error message="hang"/></testcase>
<testcase name="test_rejected"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_cases_are_counted_by_test_and_outcome(tmp_path, monkeypatch):
    report = tmp_path / "engine.xml"
    report.write_text(REPORT, encoding="utf-8")
    monkeypatch.setattr(tests_run, "version", lambda engine: f"1.0 of {engine}")
    assert tests_run.rows_of("sglang", report) == [
        {"engine": "sglang", "version": "1.0 of sglang", "test": name, "passed": one, "failed": two, "skipped": three}
        for name, one, two, three in (("test_exact", 1, 2, 0), ("test_rejected", 0, 0, 1))
    ]
