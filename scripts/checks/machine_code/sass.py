"""Instructions of NVIDIA's machine code, read from cuobjdump's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LOCAL = ("LDL", "STL")  # loads from a thread's own memory, and stores to it
OF_WARPGROUPS = ("HGMMA", "IGMMA")
OF_INT8 = ("IGMMA", "UTCIMMA", "IMMA")
PRODUCTS = ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA", *OF_INT8)
"""Tensor-core products in SASS: of a warpgroup on Hopper, of tensor memory on Blackwell, of a warp elsewhere."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of one warp."""

    at: int  # address in the function
    text: str  # as cuobjdump writes it, with its predicate

    @property
    def name(self) -> str:
        """Name, with as much of its suffix as says what it does."""
        opcode = re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]  # as "LDSM.16.M88.4"
        for kept in ("MUFU.EX2", "WARPGROUP.DEPBAR"):
            if opcode.startswith(kept):
                return kept
        return opcode.split(".")[0]

    @property
    def target(self) -> int | None:
        """Address to which a branch goes, or None."""
        match = re.search(r"\bBRA\S* (?:.*, )?`?\(?(0x[0-9a-f]+)", self.text)
        return int(match[1], 16) if match else None


def instructions(sass: str) -> list[Instruction]:
    """Returns the instructions of the longest function in what cuobjdump -sass wrote, in order."""
    parts = re.split(r"(?m)^\s+Function : \S+", sass)
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", max(parts, key=len), re.MULTILINE)
    return [Instruction(int(at, 16), text.strip()) for at, text in lines]


def loops(code: Sequence[Instruction]) -> list[Sequence[Instruction]]:
    """Stretches from a branch's target back to the branch.

    A jump from the kernel's end back into a loop, out of a slow path, spans its exit, and makes none.
    """
    address = {instruction.at: i for i, instruction in enumerate(code)}
    bodies = []
    for end, instruction in enumerate(code):
        if instruction.target is not None and instruction.target < instruction.at and instruction.target in address:
            body = code[address[instruction.target] : end + 1]
            if not any(inner.name == "EXIT" for inner in body):
                bodies.append(body)
    return bodies
