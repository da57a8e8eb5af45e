"""Reads compiled kernels: registers and local memory, and of attention's what a step of the loop is made of and needs.

All by text, from three sources: Triton's TTGIR says what the pipeliner did, ptxas' log counts registers and says
whether it serialised products, SASS is what runs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.checks.machine_code.launches import Compiled


class Multiprocessor(NamedTuple):
    """Limits of one multiprocessor. shared: bytes of all programs, of which each takes 1 KB more than it asks for"""

    shared: int
    threads: int
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(164 << 10, 2048),
    86: Multiprocessor(100 << 10, 1536),
    89: Multiprocessor(100 << 10, 1536),
    90: Multiprocessor(228 << 10, 2048),
    100: Multiprocessor(228 << 10, 2048),
    103: Multiprocessor(228 << 10, 2048),
    110: Multiprocessor(228 << 10, 1536),
    120: Multiprocessor(100 << 10, 1536),
    121: Multiprocessor(100 << 10, 1536),
}
"""By architecture, as in the CUDA C++ Programming Guide, "Compute Capabilities"."""
LOCAL = ("LDL", "STL")  # loads from a thread's own memory, and stores to it
OF_WARPGROUPS = ("HGMMA", "IGMMA")
OF_INT8 = ("IGMMA", "UTCIMMA", "IMMA")
PRODUCTS = ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA", *OF_INT8)
"""Tensor-core products in SASS: of a warpgroup on Hopper, of tensor memory on Blackwell, of a warp elsewhere."""
OF_STEP = ("tile_distance", "products", "products_of_int8", "waits", "exponentials", "fused", "serialised")


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


def findings(compiled: Compiled, arch: int) -> dict[str, Any]:
    """Reads what the compilers made for a GPU of this architecture (90 for Hopper).

    Returns `of_step`, and:
        registers, spills, stack: Of a thread, bytes that do not fit them, and bytes of its own memory.
        local_accesses, local_in_loops: Loads from and stores to that memory, and those that a loop repeats.
        shared_bytes, programs_per_multiprocessor: Of a program, and how many of them fit.
    """
    registers = int(_found(r"Used (\d+) registers", compiled.log))
    code = instructions(compiled.sass)
    return of_step(compiled, code) | {
        "registers": registers,
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", compiled.log))),
        "stack": int(_found(r"(\d+) bytes stack frame", compiled.log)),
        "local_accesses": sum(instruction.name in LOCAL for instruction in code),
        "local_in_loops": len(
            {instruction.at for body in loops(code) for instruction in body if instruction.name in LOCAL}
        ),
        "shared_bytes": compiled.shared,
        "programs_per_multiprocessor": _programs(compiled, registers, MULTIPROCESSORS[arch]),
    }


def of_step(compiled: Compiled, code: Sequence[Instruction]) -> dict[str, Any]:
    """Counts, per warp, one step of the loop over full blocks; all None if no loop has tensor-core products.

    Returns:
        tile_distance: Steps before their use at which tiles of keys and values are fetched; 0: in the same one.
        products, products_of_int8, waits: Tensor-core instructions, those that multiply int8, and waits for them.
        exponentials, fused: EX2, and fused multiply-adds.
        serialised: ptxas says, or the loop shows, that no product runs next to another.
    """
    loop = full_loop(code)
    if loop is None:
        return dict.fromkeys(OF_STEP)
    step = Counter(instruction.name for instruction in loop)
    products, of_warpgroups = (sum(step[name] for name in names) for names in (PRODUCTS, OF_WARPGROUPS))
    waits = step["WARPGROUP.DEPBAR"]
    return {
        "tile_distance": tile_distance(compiled.ttgir),
        "products": products,
        "products_of_int8": sum(step[name] for name in OF_INT8),
        "waits": waits,
        "exponentials": step["MUFU.EX2"],
        "fused": step["FFMA"] + 2 * step["FFMA2"],
        "serialised": is_serialised(compiled.log) or (of_warpgroups > 2 and waits >= products),
    }


def is_serialised(log: str) -> bool:
    """Returns True if ptxas said, by any of its warnings about it, that it serialised a warpgroup's products."""
    return re.search(r"\bC751\d\b", log) is not None


def tile_distance(ttgir: str) -> int:
    """Returns how many steps before its use a tile's copy is issued, in the loop of products that fetches earliest.

    The pipeliner has moved the first steps' copies before the loop: a step's tiles for each step of distance, less
    what has been used before the loop, too.
    """
    # Only loops are indented further than the kernel's body, and only the kernel's own body has loops.
    distance, before = 0, 0
    for position in (match.start() for match in re.finditer(r"scf\.for", ttgir)):
        end = ttgir.index("tt.num_stages", position)
        if re.search(_DOT, ttgir[position:end]):
            copies, products = (len(re.findall(what, ttgir[before:position])) for what in (_TILE_COPY, _DOT))
            of_step = len(re.findall(_TILE_COPY, ttgir[position:end])) or 2
            distance, before = max(distance, (copies - products) // of_step), end
    return distance


_DOT = r"ttng\.warp_group_dot |ttng\.tc_gen5_mma |tt\.dot "
_TILE_COPY = r"ttng\.async_tma_copy_global_to_local |ttg\.async_copy_global_to_local .*tensor<\d+x\d+x!tt\.ptr"


def full_loop(code: Sequence[Instruction]) -> Sequence[Instruction] | None:
    """Returns the loop over full blocks, the shortest with products, as the other masks; None: there is none."""
    return min(
        (body for body in loops(code) if any(instruction.name in PRODUCTS for instruction in body)),
        key=len,
        default=None,
    )


def _programs(compiled: Compiled, registers: int, of: Multiprocessor) -> int:
    threads = int(_found(r"\.(?:reqntid|maxntid) (\d+)", compiled.ptx))
    of_warp = -(-registers * 32 // 256) * 256
    return min(
        of.shared // (compiled.shared + 1024), of.threads // threads, of.registers // (of_warp * -(-threads // 32))
    )


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"the compiler's output has nothing like {pattern!r}")
    return match[1]


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
