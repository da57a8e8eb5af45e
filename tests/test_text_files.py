"""Text files are UTF-8 in every locale: no call leaves the encoding to it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT

FOLDERS = (*ROOT.glob("dbsp_*"), ROOT / "kernels", ROOT / "scripts", ROOT / "examples")
MODE = {"open": 1, "fdopen": 1}
"""Position of the argument `mode` of functions; of methods it is one less."""
ENCODING = {"read_text": 0, "write_text": 1}
"""Position of the argument `encoding` of methods."""
OTHERS = ("archive", "Image", "tarfile", "zipfile", "webbrowser", "os", "gzip")
"""Modules, and variables, whose `open` has no encoding."""


def without_encoding(source: str) -> Iterator[int]:
    """Yields the lines of calls that read or write text in the locale's encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg in ("encoding", None) for word in call.keywords):
            continue
        method = isinstance(call.func, ast.Attribute)
        owner = call.func.value.id if method and isinstance(call.func.value, ast.Name) else None
        name = call.func.attr if method else getattr(call.func, "id", None)
        if name in ENCODING and method and len(call.args) <= ENCODING[name]:
            yield call.lineno
        if name in MODE and not (name == "open" and owner in OTHERS):
            at = MODE[name] - (1 if method and owner != "os" else 0)
            given = [*call.args[at : at + 1], *(word.value for word in call.keywords if word.arg == "mode")]
            mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r"
            if "b" not in str(mode):
                yield call.lineno


def programs() -> Iterator[tuple[Path, str]]:
    """Yields every Python program and its text, also those without a suffix."""
    for path in (path for folder in FOLDERS for path in sorted(folder.rglob("*"))):
        if path.is_file() and path.suffix in ("", ".py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.suffix or re.match(r"#!.*python", text):
                yield path, text


def test_text_files_are_read_and_written_in_utf_8_for_any_locale() -> None:
    found = {str(path.relative_to(ROOT)): list(without_encoding(text)) for path, text in programs()}
    assert len(found) > 100
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_calls_that_leave_the_encoding_to_the_locale_are_found() -> None:
    wrong = ["path.read_text()", "path.write_text(text)", "open(path)", "open(path, mode='w')", "path.open('w')"]
    wrong += ["os.fdopen(number, 'w')"]
    right = ["path.read_text('utf-8')", "path.write_text(text, encoding='utf-8')", "open(path, 'rb')"]
    right += ["path.open('rb')", "os.fdopen(number, 'wb')", "Image.open(path)"]
    assert [len(list(without_encoding(one))) for one in wrong + right] == [1] * len(wrong) + [0] * len(right)
