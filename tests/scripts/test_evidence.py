"""docs/results/evidence.yaml has every result, and finds those whose sources have changed."""

from __future__ import annotations

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


def test_every_result_has_one_entry():
    listed = [name for one in read_evidence() for name in one.files]
    there = [path.name for path in RESULTS.iterdir() if path.suffix in (".csv", ".json", ".png")]
    assert sorted(listed) == sorted(there)


def test_each_says_how_and_is_cited_and_what_is_measured_on_which_machine():
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md"))
    for one in read_evidence():
        assert one.how
        assert set(one.how) <= set(KINDS), one.files
        assert ("measured" in one.how) == (one.machine is not None), one.files
        assert [source for source in one.all_sources() if not (ROOT / source).exists()] == [], one.files
        assert any(name in pages for name in one.files), one.files


def test_changes_of_sources_are_found(tmp_path, monkeypatch):
    """In a repository in which scripts.made.one made one.csv from product/."""
    sources = ("product/part.py", "scripts/made/one.py")
    for name in (*sources, "scripts/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.setattr(evidence, "EVIDENCE", tmp_path / "evidence.yaml")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--quiet", "--message", "x")

    def changes(commit: str) -> list[str] | None:
        (tmp_path / "evidence.yaml").write_text(ENTRY.format(commit=commit), encoding="utf-8")
        return changes_since(read_evidence()[0])

    made_at = git(tmp_path, "rev-parse", "--short=8", "HEAD")
    assert changes("0123abcd") is None, "a clone lacks the commit"
    (tmp_path / "scripts" / "other.py").write_text("# changed\n", encoding="utf-8")
    assert changes(made_at) == [], "it is no source"
    for count, source in enumerate(sources, 1):
        (tmp_path / source).write_text("# changed\n", encoding="utf-8")
        assert changes(made_at) == list(sources[:count])
