"""Instructions of NVIDIA's machine code, read from cuobjdump's text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

LOCAL = ("LDL", "STL")
"""Loads from a thread's own memory, and stores to it."""
OF_WARPGROUPS = ("HGMMA", "IGMMA")
OF_INT8 = ("IGMMA", "UTCIMMA", "IMMA")
PRODUCTS = ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA", *OF_INT8)
"""Tensor-core products in SASS: of a warpgroup on Hopper, of tensor memory on Blackwell, of a warp elsewhere."""


@dataclass(frozen=True)
class Instruction:
    """One instruction of one warp.

    Attributes:
        at: Address in the function.
        text: As cuobjdump writes it, with its predicate.
    """

    at: int
    text: str

    @property
    def opcode(self) -> str:
        """With all of its suffixes, as "LDSM.16.M88.4"."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @property
    def name(self) -> str:
        """Name, with as much of its suffix as says what it does."""
        for kept in ("MUFU.EX2", "WARPGROUP.DEPBAR", "WARPGROUP.ARRIVE", "SYNCS.PHASECHK"):
            if self.opcode.startswith(kept):
                return kept
        return self.opcode.split(".")[0]

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


def _queue_of_products(waiting: list[int], instruction: Instruction) -> list[int]:
    """Returns the groups of products not waited for after an instruction; the last one is open."""
    if instruction.name in OF_WARPGROUPS:
        waiting = [*waiting[:-1], waiting[-1] + 1]
        return [*waiting, 0] if "gsb" in instruction.text else waiting
    if instruction.name == "WARPGROUP.DEPBAR":
        kept = int(instruction.text.rsplit(",", 1)[1], 16)
        return [*(waiting[:-1][-kept:] if kept else []), waiting[-1]]
    return waiting


def in_flight_at_exponentials(loop: Sequence[Instruction]) -> float | None:
    """Counts a warpgroup's products not yet waited for at a MUFU.EX2 of a step, on average; None: there are none.

    What is 0 has nothing on the tensor core while its softmax runs. Exponentials of one value a row count as others.
    """
    if not any(instruction.name in OF_WARPGROUPS for instruction in loop):
        return None
    waiting: list[int] = [0]
    for instruction in loop:  # a step before, for what it leaves in flight
        waiting = _queue_of_products(waiting, instruction)
    counted = []
    for instruction in loop:
        waiting = _queue_of_products(waiting, instruction)
        if instruction.name == "MUFU.EX2":
            counted.append(sum(waiting))
    return sum(counted) / len(counted) if counted else None
