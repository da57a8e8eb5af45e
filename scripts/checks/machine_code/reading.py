"""Reads compiled kernels: registers and local memory, and of attention's what a step of the loop is made of and needs.

All by text, from three sources: Triton's TTGIR says what the pipeliner did, ptxas' log counts registers and says
whether it serialised products, SASS is what runs.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from scripts.checks.machine_code.compiler import Compiled

__all__ = ["MULTIPROCESSORS", "Findings", "Step", "findings", "full_loop", "is_serialised", "tile_distance"]


@dataclass(frozen=True)
class Multiprocessor:
    """shared: bytes for all programs together, of which each takes 1 KB more than it asks for"""

    shared: int
    threads: int
    registers: int = 65536


MULTIPROCESSORS = {
    80: Multiprocessor(164 << 10, 2048),
    90: Multiprocessor(228 << 10, 2048),
    100: Multiprocessor(228 << 10, 2048),
    120: Multiprocessor(100 << 10, 1536),
}
"""By architecture, from the CUDA programming guide's table of compute capabilities."""

PRODUCTS = ("HGMMA", "UTCHMMA", "UTCQMMA", "HMMA")
"""Tensor-core products in SASS: of a warpgroup on Hopper, of tensor memory on Blackwell, of a warp elsewhere."""


@dataclass(frozen=True)
class Step:
    """One step of the loop over full blocks, counted per warp.

    tile_distance: steps ahead of their use at which tiles of keys and values are fetched; 0: each waits for its own
    products, waits: tensor-core instructions, and instructions that wait for such
    tile_waits: that wait for tiles; exponentials, fused, instructions: EX2, fused multiply-adds, and all together
    serialised: ptxas says, or the loop shows, that no product runs beside another
    """

    tile_distance: int
    products: int
    waits: int
    tile_waits: int
    exponentials: int
    fused: int
    instructions: int
    serialised: bool


@dataclass(frozen=True)
class Findings:
    """Of one kernel.

    step: of its loop with tensor-core products; None: it has none
    registers, spills, stack: of a thread, bytes that do not fit them, and bytes of its own memory
    local_accesses: loads from, and stores to, that memory
    shared_bytes, programs_per_multiprocessor: of a program, and how many of them fit
    """

    step: Step | None
    registers: int
    spills: int
    stack: int
    local_accesses: int
    shared_bytes: int
    programs_per_multiprocessor: int


def findings(compiled: Compiled, arch: int) -> Findings:
    registers = int(_found(r"Used (\d+) registers", compiled.log))
    return Findings(
        step=_step(compiled),
        registers=registers,
        spills=sum(map(int, re.findall(r"(\d+) bytes spill", compiled.log))),
        stack=int(_found(r"(\d+) bytes stack frame", compiled.log)),
        local_accesses=sum(_name(text) in ("LDL", "STL") for _, text in _instructions(compiled.sass)),
        shared_bytes=compiled.shared,
        programs_per_multiprocessor=_programs(compiled, registers, MULTIPROCESSORS[arch]),
    )


def _step(compiled: Compiled) -> Step | None:
    step = full_loop(compiled.sass)
    if step is None:
        return None
    products, waits = sum(step[name] for name in PRODUCTS), step["WARPGROUP.DEPBAR"]
    return Step(
        tile_distance=tile_distance(compiled.ttgir),
        products=products,
        waits=waits,
        tile_waits=step["SYNCS.PHASECHK"] + step["DEPBAR"],
        exponentials=step["MUFU.EX2"],
        fused=step["FFMA"] + 2 * step["FFMA2"],
        instructions=step.total(),
        serialised=is_serialised(compiled.log) or (step["HGMMA"] > 2 and waits >= products),
    )


def is_serialised(log: str) -> bool:
    """Whether ptxas said, by any of its warnings about it, that it serialised a warpgroup's products."""
    return re.search(r"\bC751\d\b", log) is not None


def tile_distance(ttgir: str) -> int:
    """How many steps before its use a tile's copy is issued in the first loop with products.

    Where warps are specialised, the producer runs ahead by all but one of the ring's buffers. Elsewhere the pipeliner
    has moved the first steps' copies before the loop: those of keys and of values for each step of distance, less what
    has been used before the loop, too.
    """
    if "ttg.warp_specialize" in ttgir:
        rings = Counter(re.findall(r"ttg.local_alloc : \(\) -> !ttg.memdesc<(\d+)x\d+x\d+x\w+", ttgir))
        return min(int(slots) for slots, number in rings.items() if number == 2) - 1  # of keys, and of values
    # Only loops are indented further than the kernel's body, and only the kernel's own body has loops.
    before = []
    for position in (match.start() for match in re.finditer(r"scf\.for", ttgir)):
        if re.search(_DOT, ttgir[position : ttgir.index("tt.num_stages", position)]):
            before = ttgir[:position].splitlines()
            break
    copies = sum(re.search(_TILE_COPY, line) is not None for line in before)
    return (copies - sum(re.search(_DOT, line) is not None for line in before)) // 2


_DOT = r"ttng\.warp_group_dot |ttng\.tc_gen5_mma |tt\.dot "
_TILE_COPY = r"ttng\.async_tma_copy_global_to_local |ttg\.async_copy_global_to_local .*tensor<\d+x\d+x!tt\.ptr"


def full_loop(sass: str) -> Counter[str] | None:
    """Instructions of the loop over full blocks, by name: of the loops with products the shortest, as the other masks.

    None where there is no loop with tensor-core products.
    """
    code = _instructions(sass)
    steps = []
    for end, text in code:
        back = re.search(r"\bBRA\S* (?:.*, )?`?\(?(0x[0-9a-f]+)", text)
        if back and int(back[1], 16) < end:
            body = [_name(other) for at, other in code if int(back[1], 16) <= at <= end]
            # A jump from the kernel's end back into a loop, out of a slow path, spans its exit, and is none itself.
            if "EXIT" not in body and any(name in PRODUCTS for name in body):
                steps.append(Counter(body))
    return min(steps, key=Counter.total, default=None)


def _instructions(sass: str) -> list[tuple[int, str]]:
    """Addresses and texts."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(int(at, 16), text) for at, text in lines]


def _name(instruction: str) -> str:
    """An instruction's name, with as much of its suffix as tells what it does."""
    whole = re.sub(r"^@!?U?P\w+ ", "", instruction).split()[0]
    for kept in ("MUFU.EX2", "WARPGROUP.DEPBAR", "WARPGROUP.ARRIVE", "SYNCS.PHASECHK"):
        if whole.startswith(kept):
            return kept
    return whole.split(".")[0]


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
