"""The site of docs/ builds without a warning, and its API page has what the packages export."""

from __future__ import annotations

import re
import sys

import pytest

import dbsp_core
import dbsp_diffusers
import dbsp_para
import dbsp_xdit
from scripts.docs_site import settings_tables
from tests.support.programs import run
from tests.support.repository import ROOT


@pytest.mark.long
def test_the_site_builds_strictly(tmp_path):
    strict = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "scripts/docs_site"]
    done = run([sys.executable, "-m", "sphinx", *strict, "docs", str(tmp_path)], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "README.html").exists()
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    for package in (dbsp_core, dbsp_diffusers, dbsp_para, dbsp_xdit):
        for name in package.__all__:
            assert f'id="{package.__name__}.{name}"' in api or f'id="dbsp_diffusers.{name}"' in api, name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {f"{name}.md" for name in re.findall(r"\]\(([\w/-]+)\.md\)", index)}
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert listed == pages - {"README.md"}


def test_tables_of_settings_say_what_their_classes_say():
    text = settings_tables.PAGE.read_text(encoding="utf-8")
    assert text == settings_tables.with_tables(text), "run scripts/docs tables"
    assert text.count("<!-- table ") == text.count("<!-- end -->") == len(settings_tables.SECTIONS) + 1


def test_a_table_that_is_stale_is_found():
    text = settings_tables.PAGE.read_text(encoding="utf-8").replace("| `reuse` | `1.02`", "| `reuse` | `1.2`")
    assert text != settings_tables.with_tables(text)
