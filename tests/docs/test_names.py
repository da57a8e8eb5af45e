"""Names in code quotes exist, settings that texts ask for too, and docstrings have one form."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

from tests.support.repository import ROOT
from tests.support.texts import PAGES, docstrings_of, found_in, nodes_of, strings_of, tree_of, without_code_blocks
from tests.test_layering import PACKAGES, files

SOURCES = files(*PACKAGES)
OTHER_CODE = [path for folder in ("tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
PRESENT = [path for path in PAGES if path.name != "CHANGES.md"]
"""Pages without the one that names what is gone."""
FROM_OTHERS = {
    # What other projects call things, in tables that translate.
    *("cu_seqlens", "seqused_k", "softmax_lse", "nablaT_v2", "add_sta"),
    # Files of other projects, and what users may call or set there.
    *("sparse_reordered_all.pt", "cogvideo_lut.pt", "load_lora_weights", "NCCL_SOCKET_IFNAME", "ball.rankn.log"),
    *("xFuserArgs.add_cli_args", "advanced_uaa", "WorkerProc._async_output_loop"),
    *("_sp_plan", "custom_attention", "vsa_h3_sparsity", "attention_type", "dense_layers", "reorder"),
    # Programs.
    *("nvcc", "nohup", "mpirun"),
}
"""Names that our texts quote and our code does not have."""
_QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_QUOTING_COMMENT = re.compile(r"#.*`")
_NAME = re.compile(r"\.?[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
_WORD = re.compile(r"[A-Za-z_]\w*")


def prose_of(path: Path) -> str:
    """Returns a page; of a source file its docstrings, and its comments if one may have code quotes."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return without_code_blocks(source)
    comments = []
    if _QUOTING_COMMENT.search(source):  # tokenizing is slow
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(docstrings_of(path) + comments)


def quoted_names(text: str) -> list[str]:
    """Returns words that a text has in code quotes, with dots or not; words of one or two letters left out."""
    names = [quoted.strip() for quoted in _QUOTED.findall(text) if _NAME.fullmatch(quoted.strip())]
    return [name for name in names if len(name) > 2]


@cache
def words_of(path: Path) -> frozenset[str]:
    """Returns every word of a source file, its texts and its name; docstrings and comments left out."""
    words = {*path.relative_to(ROOT).with_suffix("").parts, "py"}
    words.update(word for text in strings_of(path) for word in _WORD.findall(text))
    for node in nodes_of(path):
        words.update(name for _, value in ast.iter_fields(node) if isinstance(value, str) for name in value.split("."))
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            words.update(node.names)
    return frozenset(words)


@cache
def words_of_product() -> frozenset[str]:
    """Returns every word of our packages and of settings."""
    words = set().union(*map(words_of, SOURCES))
    for pattern in ("configs/**/*.yaml", "scripts/*", "*.toml", "docs/**/*.*", ".github/**/*.yml"):
        for path in filter(Path.is_file, ROOT.glob(pattern)):
            words.update(_WORD.findall(path.name))
            if path.suffix in {"", ".yaml", ".yml", ".toml", ".sh"}:
                words.update(_WORD.findall(path.read_text(encoding="utf-8")))
    return frozenset(words)


@cache
def is_word_of_code(word: str) -> bool:
    """Returns True if our packages have a word, or tests or scripts, of which those with its letters are parsed."""
    if word in words_of_product():
        return True
    others = (path for path in OTHER_CODE if path != Path(__file__))
    return any(word in words_of(path) for path in others if word in f"{path} {path.read_text(encoding='utf-8')}")


@cache
def members() -> dict[str, frozenset[str]]:
    """Returns what each class and module of ours defines, by its name; a class has its bases' too."""
    own: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        tree = tree_of(path)
        module = path.parent.name if path.stem == "__init__" else path.stem
        own[module] |= {name for node in tree.body for name in _defined(node)}
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases[node.name] |= {_last(base) for base in node.bases}
                own[node.name] |= {name for inner in ast.walk(node) for name in _defined(inner)}
        own[path.parent.name].add(path.stem)

    def all_of(name: str) -> set[str]:
        return own[name].union(*(all_of(base) for base in bases[name] if base != name))

    return {name: frozenset(all_of(name)) for name in list(own)}


def _last(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _defined(node: ast.AST) -> list[str]:
    """Returns names that a statement defines: functions, classes, variables, imports, and attributes of `self`."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name for alias in node.names]
    if not isinstance(node, (ast.Assign, ast.AnnAssign)):
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    names = [inner for target in targets for inner in ast.walk(target) if isinstance(inner, (ast.Name, ast.Attribute))]
    return [_last(name) for name in names]


def exists(name: str) -> bool:
    """Returns True for a name of our code or settings, of an installed package, or known to be another project's."""
    name = name.removesuffix("()").strip(".")
    first, *rest = name.split(".")
    if name in FROM_OTHERS:
        return True
    if first in {"torch", "numpy", "triton", "diffusers", "transformers", "xfuser", "para_attn"}:
        return _exists_elsewhere(name)
    if rest and first[:1].isupper() and first in members():
        return rest[0] in members()[first]
    return all(map(is_word_of_code, (first, *rest)))


def _exists_elsewhere(name: str) -> bool:
    """Looks a name up in the package it begins with, where that is installed."""
    first, *rest = name.split(".")
    if importlib.util.find_spec(first) is None or first == "xfuser":  # which cannot be imported without a GPU
        return True
    found, module = importlib.import_module(first), first
    for part in rest:
        if not hasattr(found, part):
            try:
                importlib.import_module(f"{module}.{part}")
            except ImportError:
                return False
        found, module = getattr(found, part), f"{module}.{part}"
    return True


def test_names_in_code_quotes_exist():
    def wrong(path: Path) -> list[str]:
        return [name for name in quoted_names(prose_of(path)) if not exists(name)]

    assert found_in(SOURCES + PRESENT, wrong) == {}


def test_names_that_do_not_exist_are_found():
    text = "`SequenceGroup.alone` `SequenceGroup.gone` `planning.nothing_there` `torch.no_grad()` `torch.gone` `a - b`"
    text += " `Plan` `Nosuchclass` `NOSUCHTABLE` `U2R2`"
    assert [name for name in quoted_names(text) if not exists(name)] == [
        "SequenceGroup.gone",
        "planning.nothing_there",
        "torch.gone",
        "Nosuchclass",
        "NOSUCHTABLE",
    ]


@cache
def settings() -> set[str]:
    """Returns keys of the configuration: those of the tables of its page, which are made from the code."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `.*", page, re.M)
    return {"source"}.union(*(re.findall(r"`(\w+)`", row) for row in rows))


def unknown_settings(text: str) -> list[str]:
    """Returns keys that a text asks to set, as `key: value` or as "set key: value", and that do not exist."""
    asked = re.findall(r"(?:(?<!`)`\{?|\bset )(\w+): [^`\s]", text)
    return [key for key in asked if key not in settings() | FROM_OTHERS]


def test_settings_that_a_text_asks_for_exist():
    assert found_in(PRESENT, lambda path: unknown_settings(prose_of(path))) == {}
    assert found_in(SOURCES, lambda path: unknown_settings("\n".join(strings_of(path)))) == {}


def test_settings_that_do_not_exist_are_found():
    text = "`exchange: {precision: int8}`, or set layout: local; `mask: dense`, `{source: sparge, cdf: 0.9}`"
    assert unknown_settings(text) == ["exchange", "layout"]


def private_forms(docstring: str) -> list[str]:
    """Returns arguments and results that are neither in a sentence nor under a heading of Google's form."""
    sections = re.compile(r"^ *(Args|Attributes|Returns|Raises|Yields):$.*", re.M | re.S)
    return re.findall(r"\breturns:|(?:^ *|; +)[a-z]\w*(?:, \w+)*: +\S", sections.sub("", docstring), re.M)


def test_docstrings_have_one_form():
    assert found_in(SOURCES, lambda path: [one for text in docstrings_of(path) for one in private_forms(text)]) == {}


def test_private_forms_are_found():
    assert len(private_forms("Adds two. returns: the sum\n\n    a: one;  b: two")) == 3
    assert private_forms("Adds two: a and b.\n\nArgs:\n    a: One.\n\nReturns:\n    The sum.") == []
