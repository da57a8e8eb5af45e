"""docs/troubleshooting.md quotes messages that db-SP really has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.repository import ROOT

REPOSITORY = ROOT
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text()
OTHERS = ("unrecognized arguments", "import xfuser", "terminate called", "Failed to load the backend")
"""Quoted, but said by others."""


def constants() -> Iterator[str]:
    """Every string constant of the packages, f-strings in the pieces between their values."""
    for package in ("dbsp_core", "dbsp_diffusers", "dbsp_para", "dbsp_xdit", "dbsp_cli", "kernels"):
        for file in (REPOSITORY / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def quoted() -> list[str]:
    """Messages in bold code on the page, line breaks closed up."""
    spans = re.findall(r"\*\*`([^`]+)`", PAGE)
    return [span for span in (" ".join(span.split()) for span in spans) if not any(o in span for o in OTHERS)]


@pytest.fixture(scope="module")
def messages():
    return list(constants())


def test_the_page_quotes_many_messages():
    assert len(quoted()) > 20


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_in_the_code(messages, message):
    for piece in re.split(r"…", message):
        assert any(piece.strip() in constant for constant in messages), piece
