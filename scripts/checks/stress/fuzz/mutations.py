"""Damaged copies of texts, bytes and trees of values."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_PLAIN = """
-1 0 1 3 7 64 65537 2147483648 999999999999 -0.0 1e308 1e-320 nan .nan inf .inf -.inf null ~ true [] {} [[[[]]]]
.. ../x / /dev/null . 8GiB 1e400GiB -1GiB auto thw tile:0x0x0 tile:999999999x1x1 U2R2 U0R1 U999999R1 U1R-1
sparge window:window=[1,2 window:window=[0,0,0] sparge:cdf=2 synthetic:density=.nan svg:frames= *b %TAG 0x1F 0o7
1_0 g8n4 g0n1 g1n2+ g4b1i512f85s1 g1b1i99999999999f1 0-9,10- 9-0 5- float32 ${HOME} ~/x - -- --help = , ,, 1,2,3
1x2x3 0,0,0 1,-2,3
"""
WORDS = (
    *_PLAIN.split(),
    *("", "9" * 5000, "[1, 2]", "{a: 1}", "'", '"', "b'x'"),
    *("é", "🎞", "\x00", "\ud800", "\u2028", "٣", "²", " ", "\n", "\r", "\x1c1", "\x85", "a" * 3000),
    *("!!python/object/apply:os.system ['true']", "&a [*a]", "<<: *c", "? x", "!!bool maybe", "!!int ''"),
    *("!!timestamp x", "g" + "9" * 5000 + "n1", "0x" + "F" * 5000, "1:" * 300 + "1.5"),
)
"""Inputs that break readers: extremes, other types, other alphabets, markup, paths."""
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), -float("inf"), "", "x", [], {}, [1, 2], ["x"], [[]], [None], {"a": 1}, {"": {}}),
)


def mutated_text(rng: random.Random, text: str) -> str:
    """Makes one to four changes."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, to = sorted(rng.randint(0, len(text)) for _ in range(2))
        how = rng.randrange(7)
        if how == 0:
            text = text[:at] + rng.choice(WORDS) + text[at:]
        elif how == 1:
            text = text[:at] + text[min(to, at + 12) :]
        elif how == 2:
            text = text[:at] + text[at : at + 30] * 2 + text[at + 30 :]
        elif how == 3:
            lines = text.split("\n")
            rng.shuffle(lines)
            text = "\n".join(lines)
        elif how == 4:
            words = text.split(" ")
            words[rng.randrange(len(words))] = rng.choice(WORDS)
            text = " ".join(words)
        elif how == 5:
            text = text[:at] + chr(rng.randrange(1, 0x300)) + text[at + 1 :]
        else:
            lines = text.split("\n")
            line = rng.randrange(len(lines))
            lines[line] = lines[line].partition(":")[0] + ": " + rng.choice(WORDS)
            text = "\n".join(lines)
    return text


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Makes one to four changes."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, how = rng.randint(0, len(found)), rng.randrange(6)
        if how == 0:
            del found[at:]
        elif how == 1:
            found[at : at + rng.randint(1, 8)] = rng.randbytes(rng.randint(0, 16))
        elif how == 2:
            found[at:at] = found[at : at + 64]
        elif how == 3 and found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
        elif how == 4:
            head = rng.randrange(min(200, len(found) + 1))
            found[head : head + 1] = bytes([rng.randrange(256)])
        else:
            found[at : at + 8] = rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 1]).to_bytes(8, "little")
    return bytes(found)


def mutated_tree(rng: random.Random, tree: Any) -> Any:
    """Returns a copy in which one to three values are others, gone, or there twice."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 2, 3])):
        node = tree
        while isinstance(node, (dict, list)) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            below = node[key]
            if isinstance(below, (dict, list)) and below and rng.random() < 0.85:
                node = below
                continue
            how = rng.randrange(5)
            if how == 0:
                del node[key]
            elif how == 1 and isinstance(node, dict):
                node[rng.choice([*map(str, WORDS[:20]), f"{key}x"])] = copy.deepcopy(below)
            elif how == 2 and isinstance(node, list):
                node.append(copy.deepcopy(below))
            else:
                node[key] = copy.deepcopy(rng.choice([*VALUES, rng.choice(WORDS)]))
            break
    return tree


def mutated_json(rng: random.Random, text: str) -> str:
    """Changes JSON as a tree, as text, or in JSON that is quoted in it."""
    if rng.random() < 0.25:
        return mutated_text(rng, text)
    if rng.random() < 0.02:
        return "[" * 200_000
    tree = json.loads(text)
    about = tree.get("__metadata__", {}) if isinstance(tree, dict) else {}
    quoted = [key for key, value in about.items() if value.startswith("[")]
    if quoted and rng.random() < 0.5:
        about[quoted[0]] = mutated_json(rng, about[quoted[0]])
        return json.dumps(tree)
    return json.dumps(mutated_tree(rng, tree))


def mutated_safetensors(rng: random.Random, content: bytes) -> bytes:
    """Changes a file in its header's values, or in its bytes."""
    if rng.random() < 0.4:
        return mutated_bytes(rng, content)
    size = int.from_bytes(content[:8], "little")
    header = mutated_json(rng, content[8 : 8 + size].decode()).encode("utf-8", "surrogatepass")
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def mutated_words(rng: random.Random, words: list[str]) -> list[str]:
    """Returns a command line with one to three changes."""
    words = list(words)
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, how = rng.randrange(len(words)), rng.randrange(6)
        if how == 0 and len(words) > 1:
            del words[at]
        elif how == 1:
            words.insert(at, rng.choice(words))
        elif how == 2:
            words[at] = mutated_text(rng, words[at])
        else:
            words[at] = rng.choice(WORDS)
    return [word.replace("\x00", "") for word in words]  # which no command line can hold
