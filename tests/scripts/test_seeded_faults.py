"""scripts/checks/seeded_faults: its faults are faults of today's sources, and what tests miss is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.checks.seeded_faults import FAULTS, REPO, copied, tried


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.concept)
def test_fault_changes_one_line_and_its_tests_exist(fault):
    assert (REPO / fault.file).read_text(encoding="utf-8").count(fault.text) == 1
    assert fault.text != fault.replacement
    assert (REPO / fault.tests.split()[0]).exists()


@pytest.mark.long
def test_a_fault_is_caught_and_no_fault_is_missed(tmp_path):
    copy, fault = copied(tmp_path / "copy"), FAULTS[0]
    assert tried(replace(fault, replacement=fault.text), copy, 0) == "missed"
    assert tried(fault, copy, 1) == "caught"
    assert (copy / fault.file).read_text(encoding="utf-8") == (REPO / fault.file).read_text(encoding="utf-8")
