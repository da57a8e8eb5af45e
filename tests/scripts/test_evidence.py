"""docs/results/evidence.yaml has every result, and finds those whose sources have changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.results import evidence
from scripts.results.evidence import KINDS, changes_since, read_evidence
from tests.support.repository import ROOT, git

RESULTS = ROOT / "docs" / "results"
ENTRY = """
- files: [one.csv, one.png]
  what: numbers
  command: python -m scripts.made.one --fast
  how: [counted]
  commit: "{commit}"
  sources: [product]
"""


class TestEntries:
    def test_every_result_has_one_entry(self):
        listed = [name for one in read_evidence() for name in one.files]
        there = [path.name for path in RESULTS.iterdir() if path.suffix in (".csv", ".json", ".png")]
        assert sorted(listed) == sorted(there)

    def test_each_says_how_and_is_cited_and_what_is_measured_on_which_machine(self):
        pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
        for one in read_evidence():
            assert one.how
            assert set(one.how) <= set(KINDS), one.files
            assert ("measured" in one.how) == (one.machine is not None), one.files
            assert [source for source in one.all_sources() if not (ROOT / source).exists()] == [], one.files
            assert any(name in pages for name in one.files), one.files


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Makes a repository in which scripts.made.one made one.csv from product/."""
    for name in ("scripts/made/one.py", "scripts/other.py", "product/part.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("", encoding="utf-8")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "evidence.yaml")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    write_entry(tmp_path, git(tmp_path, "rev-parse", "--short=8", "HEAD"))
    return tmp_path


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "x")


def write_entry(folder: Path, commit: str) -> None:
    (folder / "evidence.yaml").write_text(ENTRY.format(commit=commit), encoding="utf-8")


class TestChanges:
    def test_what_is_no_source_does_not_matter(self, checkout):
        assert changes_since(read_evidence()[0]) == []
        (checkout / "scripts" / "other.py").write_text("# changed\n", encoding="utf-8")
        assert changes_since(read_evidence()[0]) == []
        write_entry(checkout, "0123abcd")
        assert changes_since(read_evidence()[0]) is None, "a clone lacks the commit"

    @pytest.mark.parametrize("source", ["product/part.py", "scripts/made/one.py"])
    def test_a_change_of_a_source_is_found(self, checkout, source):
        (checkout / source).write_text("# changed\n", encoding="utf-8")
        assert changes_since(read_evidence()[0]) == [source]
