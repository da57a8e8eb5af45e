"""Links between pages lead somewhere: files and folders are there, and headings by the names that GitHub gives."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from urllib.parse import unquote

from tests.support.repository import ROOT
from tests.support.texts import PAGES, found_in, nodes_of, without_code_blocks
from tests.test_layering import PACKAGES, files

_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:\s*<?([^\s>]+)>?", re.M)
_TAG = re.compile(r"<(?:img|a)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
_OWN_ANCHOR = re.compile(r"<a\b[^>]*?\b(?:id|name)=\"([^\"]+)\"")


def links_in(text: str) -> list[str]:
    """Returns the targets of a page's links and pictures, without those of other sites; code has none."""
    text = without_code_blocks(text)
    text = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", lambda code: "x" * len(code[0]), text, flags=re.S)
    found = [target for pattern in (_LINK, _REFERENCE, _TAG) for target in pattern.findall(text)]
    return [target for target in found if not re.match(r"[a-z][a-z0-9+.-]*:", target)]


def anchors_of(text: str) -> set[str]:
    """Returns GitHub's names of a page's headings: in lower case, with hyphens, numbered where they come again."""
    text, found = without_code_blocks(text), set(_OWN_ANCHOR.findall(text))
    for heading in re.findall(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*$", text, re.M):
        words = re.sub(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.replace("*", "").lower()).replace(" ", "-")
        again = next(n for n in range(len(text)) if (f"{name}-{n}" if n else name) not in found)
        found.add(f"{name}-{again}" if again else name)
    return found


def broken_links(page: Path) -> list[str]:
    """Returns targets of a page that lead nowhere, or out of the repository."""
    broken = []
    for target in links_in(page.read_text(encoding="utf-8")):
        file_name, _, anchor = target.partition("#")
        file = (page.parent / unquote(file_name)).resolve() if file_name else page
        found = file.is_relative_to(ROOT) and file.exists()
        if found and anchor:
            found = file.suffix == ".md" and unquote(anchor) in anchors_of(file.read_text(encoding="utf-8"))
        broken.extend([] if found else [target])
    return broken


def test_links_lead_somewhere():
    assert found_in(PAGES, broken_links) == {}


def test_messages_send_to_pages_that_are_there():
    sent = {
        node.args[0].value
        for path in (*files(*PACKAGES), *(ROOT / "scripts").rglob("*.py"))
        if "page(" in path.read_text(encoding="utf-8")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and node.args and getattr(node.func, "id", "") == "page"
    }
    assert {"engines", "masks", "kernels"} <= sent
    assert [name for name in sent if not (ROOT / "docs" / f"{name}.md").is_file()] == []
