"""Damaged copies of sequences (bytes, characters, words), of trees of values, and of files with either."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml

_Sequence = TypeVar("_Sequence", bytes, list[str])
_PLAIN = """
-1 0 1 3 7 64 65537 2147483648 999999999999 -0.0 1e308 1e-320 nan .nan inf .inf -.inf null ~ true [] {} [[[[]]]]
.. ../x / /dev/null . 8GiB 1e400GiB -1GiB auto thw tile:0x0x0 tile:999999999x1x1 U2R2 U0R1 U999999R1 U1R-1
sparge window:window=[1,2 window:window=[0,0,0] sparge:cdf=2 synthetic:density=.nan svg:frames= *b %TAG 0x1F 0o7
1_0 g8n4 g0n1 g1n2+ g4b1i512f85s1 g1b1i99999999999f1 0-9,10- 9-0 5- float32 ${HOME} ~/x - -- --help = , ,, 1,2,3
1x2x3 0,0,0 1,-2,3
"""
WORDS = (
    *_PLAIN.split(),
    *("", "9" * 5000, "[1, 2]", "{a: 1}", "'", '"', "b'x'", "[" * 20_000),
    *("é", "🎞", "\x00", "\ud800", "\u2028", "٣", "²", " ", "\n", "\r", "\x1c1", "\x85", "a" * 3000),
    *("!!python/object/apply:os.system ['true']", "&a [*a]", "<<: *c", "? x", "!!bool maybe", "!!int ''"),
    *("!!timestamp x", "g" + "9" * 5000 + "n1", "0x" + "F" * 5000, "1:" * 300 + "1.5"),
)
"""Inputs that break readers: extremes, other types, other alphabets, markup, paths."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), -float("inf"), "", "x", [], {}, [1, 2], ["x"], [[]], [None], {"a": 1}, {"": {}}),
    *WORDS,
)


def damaged_words(rng: random.Random, words: list[str]) -> list[str]:
    """Returns one to four changes of a command line, or of the pieces of a text."""
    return _changed(rng, words, lambda: [rng.choice(WORDS)])


def damaged_text(rng: random.Random, text: str) -> str:
    """Returns one to four changes of characters, of words or of lines; or another text."""
    if rng.random() < 0.05:
        return rng.choice(WORDS)
    return "".join(damaged_words(rng, re.split(rng.choice(["", r"(\W)", r"(\n)"]), text)))


def damaged_bytes(rng: random.Random, content: bytes) -> bytes:
    """Returns one to four changes, some to numbers that are sizes or offsets in many formats."""
    numbers = [one.to_bytes(8, "little") for one in (0, 1, 2**31, 2**63 - 1, 2**64 - 1)]
    return _changed(rng, content, lambda: rng.choice([*numbers, *map(rng.randbytes, (1, 1, 1, 3, 16))]))


def _changed(rng: random.Random, found: _Sequence, new: Callable[[], _Sequence]) -> _Sequence:
    """Inserts, overwrites, drops, repeats or cuts off: in one of four changes within the first 200 positions."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randint(0, min(200, len(found)) if rng.random() < 0.25 else len(found))
        few, piece, how = at + rng.randint(1, 12), new(), rng.randrange(6)
        if how == 0:
            found = found[:at] + piece + found[at:]
        elif how == 1:
            found = found[:at] + found[few:]
        elif how == 2:
            found = found[:few] + found[at:]
        elif how == 3 and rng.random() < 0.5:
            found = found[:at]
        else:
            found = found[:at] + piece + found[at + len(piece) :]
    return found


def damaged_tree(rng: random.Random, tree: Any) -> Any:
    """Returns a copy in which one to three values are others, gone, or there twice; JSON in a text is a tree, too."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 2, 3])):
        node, below = None, tree
        while isinstance(below, (dict, list)) and below and (node is None or rng.random() < 0.85):
            node = below
            key = rng.choice([*node]) if isinstance(node, dict) else rng.randrange(len(node))
            below = node[key]
        how = rng.randrange(5)
        if node is None:
            return rng.choice(VALUES)
        if how == 0:
            del node[key]
        elif how == 1 and isinstance(node, dict):
            node[rng.choice([*WORDS[:20], f"{key}x"])] = copy.deepcopy(below)
        elif how == 1:
            node.append(copy.deepcopy(below))
        elif isinstance(below, str) and how < 4:
            inner = _json_in(below) if rng.random() < 0.8 else None
            node[key] = json.dumps(damaged_tree(rng, inner)) if inner else damaged_text(rng, below)
        else:
            node[key] = copy.deepcopy(rng.choice(VALUES))
    return tree


def _json_in(text: str) -> Any:
    """Returns the list or mapping that a text quotes, or None."""
    try:
        return json.loads(text) if text.startswith(("[", "{")) else None
    except (ValueError, RecursionError):
        return None


def damaged_file(rng: random.Random, path: Path) -> bytes:
    """Returns other content of a file: of its values, where its suffix says that it has some, or of its bytes."""
    content = path.read_bytes()
    if path.suffix in (".yaml", ".json"):
        return _damaged_document(rng, content, path.suffix)
    if path.suffix == ".safetensors" and rng.random() < 0.6:
        size = int.from_bytes(content[:8], "little")
        header = _damaged_document(rng, content[8 : 8 + size], ".json")
        return len(header).to_bytes(8, "little") + header + content[8 + size :]
    return damaged_bytes(rng, content)


def _damaged_document(rng: random.Random, content: bytes, suffix: str) -> bytes:
    text = content.decode()
    if rng.random() < 0.35:
        text = damaged_text(rng, text)
    elif suffix == ".yaml":
        text = yaml.safe_dump(damaged_tree(rng, yaml.safe_load(text)))
    else:
        text = json.dumps(damaged_tree(rng, json.loads(text)))
    return text.encode("utf-8", "surrogatepass")
