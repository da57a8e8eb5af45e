"""Words that have a plainer one stay out of the packages and pages, and docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.texts import PAGES, found_in, nodes_of, without_code_blocks
from tests.test_layering import PACKAGES, files

PACKAGE_FILES = files(*PACKAGES)
FOLDERS = ("tests", "scripts", "examples", "docs/pictures")
OTHER_FILES = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path != Path(__file__)]
"""Files whose words are looked at, and not the openings of their docstrings."""
INSTEAD = {
    r"travel\w*": "be sent",
    r"(kept|added|needed) keys|keys by need": "cached, delta or selective KV exchange",
    r"further chunks|keys in chunks": "later chunks, chunked KV all-to-all",
    r"periods?": "KV step",
    r"hand-?overs?|hand(ed|s) (on|over)": "ring send, KV rotation",
    r"homes?": "local shard, source rank",
    r"re-?hom(e|es|ed|ing)": "redistribute",
    r"wires?": "communication dtype",
    r"shar(e|es|ed|ing) out": "shard, distribute",
    r"uneven(ly|ness)?|evenly|evenness": "imbalanced, balanced, unequal",
    r"dense blocks?": "active block",
    r"guidance (pass|passes|branch|branches)": "CFG pass",
    r"complain\w*": "error message",
    r"refus(e|es|ed|al|als|ing)": "reject, raise, not supported",
    r"marks?": "fingerprint",
    r"serv(e|es|ed)": "support, cover",
    r"besides?": "in addition to, alongside, while",
    r"told|tell|tells|telling": "given, inferred from, distinguish",
    r"stand|stands|stood|standing|stand-ins?": "be, replace, stub",
    r"yardsticks?": "upstream implementation",
    r"campaigns?|nursery": "stress tests, fork server",
    r"same bits|to the bit|bit by bit": "bitwise identical",
    r"alike": "identical, consistently",
    r"whatever": "for any, independent of",
    r"in turns?": "interleaved, round-robin, alternately",
    r"places?|placed": "position, slot, offset, location, path",
    r"hosts?": "framework, if it is one; the CPU's side is a host",
    r"fragments?|lagged|foresee|foresight|forecast|look-ahead|seams?|dealt|deal out": "a word of docs/vocabulary.md",
    r"sole run|copy runs|mask feed": "a word of docs/vocabulary.md",
}
"""What to write instead of a word, by its pattern."""
ALLOWED = {
    r"homes?": r"HF_HOME|CUDA_HOME|XDG_CACHE_HOME|\"HOME\"|HOME}|Path\.home|home folder",
    r"campaigns?|nursery": r"campaign\.json|scripts/campaign",
    r"marks?": r"byte order mark|high-water mark|_mark\b|mark_non_differentiable|pytest\.(mark|param)|closest_marker|"
    r"marks=|markexpr",
    r"serv(e|es|ed)": r"(vllm|sglang)[ _-]?serve|serve\.py",
    r"places?|placed": r"in.place|(take|takes|took|taking) (its )?place|place_pipeline_components",
    r"in turns?": r"for \w+ in turn",
    r"hosts?": r"gethostname|[Hh]ost.?name|localhost|getaddrinfo|(a|on|in|to|from|and|or|make|the) host\b|host's|"
    r"host sync|[Hh]ost[ _]?waits?|host[ _](tensors?|indices|scalar)|HostEvent|ExpectedHost|expected.host|_host_?|"
    r"host (to host|and device)|\bhost\b(?=\[| = |\.get|:|=| else|,)",
}
"""Senses in which a word may be used: a line with one of these may have it."""
_WORDS = {pattern: re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])", re.I) for pattern in INSTEAD}
_ANY = re.compile("|".join(INSTEAD), re.I)
_WITHIN_NAMES = re.compile(r"_|(?<=[a-z])(?=[A-Z])")
_NO_PROSE = re.compile(r"`[^`]+`|(?<=\])\([^)]*\)|https?://\S+")
_QUESTIONS = {"what", "which", "how", "where", "who", "why", "when", "whether"}
_NO_VERBS = {"this", "as", "is", "its", "was", "always", "places", "columns", "less", "us"}


def words_in(source: str) -> Iterator[tuple[int, str, str]]:
    """Yields line number, what to write instead and line of each word in a source text's lines and names."""
    for number, line in enumerate(source.split("\n"), 1):
        if _ANY.search(line):  # looking for each takes seconds
            for instead in instead_of(_WITHIN_NAMES.sub("·", line), line):
                yield number, instead, line.strip()


def words_on(page: str) -> Iterator[tuple[int, str, str]]:
    """Yields the same for a page's prose: outside of code blocks, code quotes and the targets of links."""
    for number, line in enumerate(without_code_blocks(page).split("\n"), 1):
        prose = _NO_PROSE.sub(" … ", line)
        for instead in instead_of(prose, prose):
            yield number, instead, line.strip()


def instead_of(words: str, whole: str) -> Iterator[str]:
    """Yields what to write instead of each word, unless `whole`, the line, has a sense of it that is allowed."""
    for pattern, word in _WORDS.items():
        allowed = ALLOWED.get(pattern)
        if word.search(words) and not (allowed and re.search(allowed, whole)):
            yield INSTEAD[pattern]


def openings_of(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yields line number and first line of docstrings that begin neither with a verb (functions) nor a noun."""
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        text, decorators = ast.get_docstring(node) or "", " ".join(map(ast.unparse, node.decorator_list))
        first = re.split(r"[\s.,:;`]", text.strip("`") + " ")[0]
        names_a_thing = isinstance(node, ast.ClassDef) or "property" in decorators
        fits = first.lower() not in _QUESTIONS and first.lower() not in {"of", "to", "are"}
        if not names_a_thing:
            fits = first.endswith("s") and first[:1].isupper() and first.lower() not in _NO_VERBS
        if text and not fits:
            yield node.lineno, text.splitlines()[0]


def _is_help(path: Path) -> bool:
    """Returns True if a file's docstrings are help of `dbsp`, which is in the imperative."""
    return path.parent.name == "commands" or path == ROOT / "dbsp_cli" / "cli.py"


def test_words_that_have_a_plainer_one_are_not_used():
    assert found_in(PACKAGE_FILES + OTHER_FILES, lambda path: [*words_in(path.read_text(encoding="utf-8"))]) == {}


def test_words_that_have_a_plainer_one_are_not_used_on_pages():
    texts = [*PAGES, *(ROOT / "configs").rglob("*.yaml"), ROOT / "docs" / "results" / "evidence.yaml"]
    assert found_in(texts, lambda path: [*words_on(path.read_text(encoding="utf-8"))]) == {}


def test_a_word_is_found_in_the_prose_of_a_page_alone():
    page = (
        "# Refusals\n\n```\nkeys travel\n```\n[`marks`](place.md) and `in turn` on the host,\nas told: *in place*.\n"
    )
    assert [(number, word) for number, word, _ in words_on(page)] == [
        (1, "reject, raise, not supported"),
        (7, "given, inferred from, distinguish"),
    ]


def test_a_word_is_found_in_names_comments_and_strings():
    text = 'kv_home = 1  # refused here\nnote = f"{kv_home} travels"\npath.home()\nmark = "in place"\n'
    assert [(number, word) for number, word, _ in words_in(text)] == [
        (1, "local shard, source rank"),
        (1, "reject, raise, not supported"),
        (2, "be sent"),
        (2, "local shard, source rank"),
        (3, "local shard, source rank"),
        (4, "fingerprint"),
    ]


def test_docstrings_begin_with_a_verb_or_a_noun():
    no_help = [path for path in PACKAGE_FILES if not _is_help(path)]
    assert found_in(no_help, lambda path: [*openings_of(nodes_of(path))]) == {}


def test_a_docstring_that_begins_otherwise_is_found():
    text = 'class A:\n    """What it is."""\n\n    def one(self):\n        """The first."""\n'
    text += 'def two():\n    """Adds."""\n'
    assert [line for line, _ in openings_of(list(ast.walk(ast.parse(text))))] == [1, 4]
