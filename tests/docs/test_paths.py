"""Files and commands that pages, programs and settings name are there, and the code map names every file."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.texts import PAGES, found_in
from tests.test_layering import PACKAGES, files

PROGRAMS = sorted((ROOT / "scripts").rglob("*.py"))
TEXTS = [*PAGES, *sorted((ROOT / "configs").rglob("*.yaml")), *PROGRAMS]
INSIDE = ("kernels", *(name for name in PACKAGES if name != "dbsp_kernels"), "configs")
FOLDERS = (*INSIDE, "scripts", "tests", "docs")
USERS = {"configs/hardware/mine.yaml"}
"""Files that a reader is asked to make."""
_COMMAND = re.compile(r"python3? -m ((?:scripts|tests|dbsp_\w+)(?:\.\w+)+)")


@cache
def paths() -> frozenset[str]:
    """Returns files and folders of the repository, and the shorter names of those inside a package."""
    found = set()
    for folder in FOLDERS:
        top = ROOT / folder
        for path in [top, *(path for path in top.rglob("*") if "__pycache__" not in path.parts)]:
            found.add(path.relative_to(ROOT).as_posix())
            short = path.relative_to(top).parts
            found.update("/".join(short[at:]) for at in range(len(short)) if folder in INSIDE)
    return frozenset(found)


@cache
def _path_pattern() -> re.Pattern[str]:
    """Matches paths that begin with a folder of the repository, or with one inside a package and end in .py."""
    inside = {path.name for folder in INSIDE for path in (ROOT / folder).rglob("*") if path.is_dir()}
    ours, parts = "|".join(FOLDERS), "|".join(sorted(inside - {"__pycache__"}))
    return re.compile(rf"(?<![\w/.-])(?:\./)?((?:{ours})/[\w./-]*[\w/]|(?:{parts})/[\w/]*\w\.py\b)(?![\w*{{])")


def missing(text: str) -> list[str]:
    """Returns paths and modules that a text names and that are not there."""
    named = [path.rstrip("/") for path in _path_pattern().findall(text)]
    modules = _COMMAND.findall(text)
    sources = {name: name.replace(".", "/") for name in modules}
    return [
        *(path for path in named if path not in paths() | USERS),
        *(name for name, file in sources.items() if not {f"{file}.py", f"{file}/__main__.py"} & paths()),
    ]


def test_files_and_modules_that_are_named_are_there():
    assert found_in(TEXTS, lambda path: missing(path.read_text(encoding="utf-8"))) == {}


CODE_MAP = (ROOT / "docs" / "code-map.md").read_text(encoding="utf-8")
PRODUCT = [path.relative_to(ROOT) for path in files(*PACKAGES) if not path.name.startswith("__")]


def test_the_code_map_names_every_file_of_the_packages_and_no_other():
    """Expects commands without their endings."""
    named = {path: rf"[`/]{re.escape(path.name)}`" for path in PRODUCT}
    named |= {path: f"`{path.stem}`" for path in PRODUCT if path.parent.as_posix() == "dbsp_cli/commands"}
    assert [str(path) for path, pattern in named.items() if not re.search(pattern, CODE_MAP)] == []
    ending_so = set(re.findall(r"[\w/]*?(\w+\.py)`", CODE_MAP))
    assert ending_so - {path.name for path in PRODUCT} == {"test_layering.py", "method.py"}


def test_what_is_to_be_read_first_is_read_in_an_hour():
    """Counts the lines of the files in the code map's first table."""
    table = CODE_MAP.partition("## Every file")[0]
    first: list[Path] = []
    for path in re.findall(r"`([\w/]+\.py)`", table):
        first.append(ROOT / path if "/" in path else first[-1].with_name(path))
    assert len(first) == 9, "eight stops, of which one has two files"
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in first) <= 2500
