"""docs/troubleshooting.md quotes messages that db-SP really has."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator

from tests.support.repository import ROOT
from tests.support.texts import nodes_of
from tests.test_layering import PACKAGES, files

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
OTHERS = ("unrecognized arguments", "import xfuser", "terminate called", "Failed to load the backend")
"""Quoted, but said by others."""


def strings() -> Iterator[str]:
    """Every string of the packages; f-strings with … for their values."""
    for node in itertools.chain.from_iterable(map(nodes_of, files(*PACKAGES))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def quoted() -> list[str]:
    """Messages in bold code on the page, line breaks closed up."""
    spans = re.findall(r"\*\*`([^`]+)`", PAGE)
    return [span for span in (" ".join(span.split()) for span in spans) if not any(o in span for o in OTHERS)]


def is_in(message: str, texts: Iterable[str]) -> bool:
    """Whether one text has a message, in which … is for anything."""
    wanted = re.compile(".+?".join(re.escape(piece.strip()) for piece in message.split("…")), re.S)
    return any(wanted.search(text) for text in texts)


def test_the_page_quotes_messages_that_the_code_has():
    messages, texts = quoted(), list(strings())
    assert len(messages) > 20
    assert [message for message in messages if not is_in(message, texts)] == []


def test_a_message_whose_parts_are_in_different_texts_is_found():
    texts = ["has … GiB", "the weights of …"]
    assert [is_in(message, texts) for message in ("the weights of … has", "has … GiB")] == [False, True]
