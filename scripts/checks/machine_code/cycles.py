"""A cycle model of a kernel's loop: one scheduler of a multiprocessor, its warps, and the compiler's own control bits.

Taken from machine code: the instructions of a step in order, their stall counts, scoreboards and waits, groups of
products and the waits for them, named barriers. Assumed: one instruction a cycle, rates of units (`machines`) and the
latencies below; a tensor core that serves products in the order in which they come; tiles that have come. So it says
what share of a tensor core's time the schedule can use, and not what memory, power or clocks leave of it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scripts.checks.machine_code.machines import Machine
from scripts.checks.machine_code.sass import Instruction, loops

__all__ = ["Program", "Share", "steady_loop", "tensor_share"]

TAIL = 30  # cycles from a product's last to its result
BARRIER = 24
OPERANDS_READ = 12
LATENCY = {
    "MUFU": 20, "F2F": 20, "F2I": 20, "I2F": 20, "LDS": 29, "LDSM": 33, "SHFL": 24, "LDG": 40, "LDL": 40, "LDC": 20,
    "LDCU": 20, "ULDC": 20, "R2UR": 12, "S2R": 12, "S2UR": 12, "VOTEU": 12, "REDUX": 12, "SYNCS": 20, "UTMALDG": 20,
}  # fmt: skip
"""Cycles from issue to release of the scoreboard; loads from the index in L1, which nothing waits for long."""
FMA = {"FFMA", "FADD", "FMUL", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HMUL2", "HADD2", "IMAD"}
MEMORY = {"SHFL", "LDS", "LDSM", "LDG", "LDL", "STS", "STSM", "STL", "STG", "LDGSTS", "ATOMS", "RED"}
CONVERSIONS = {"F2FP", "F2F", "F2I", "I2F", "I2FP", "F2IP"}
CONTROL = {"BRA", "BAR", "NOP", "WARPGROUP", "DEPBAR", "LDGDEPBAR", "BSSY", "BSYNC", "WARPSYNC", "FENCE"}
SHARED_BYTES = 32  # a cycle: a quarter of a multiprocessor's 128
STEPS, SKIPPED = 30, 10


@dataclass(frozen=True)
class Program:
    """A kernel's loop and how many warps run it under one scheduler.

    Attributes:
        step: The loop's instructions, along its usual path.
        warps: Of one program.
        programs: On a multiprocessor.
    """

    step: Sequence[Instruction]
    warps: int
    programs: int


@dataclass(frozen=True)
class Share:
    """What a loop gets out of a tensor core.

    Attributes:
        tensor: Of its rate, 0 … 1.
        cycles: Of a step in which every warp does one.
    """

    tensor: float
    cycles: float


def steady_loop(code: Sequence[Instruction], products: Sequence[str]) -> Sequence[Instruction] | None:
    """The loop over full tiles, along its usual path: of the loops with products the shortest, as the other masks.

    Where a branch skips a wait that is tried again, it is taken; others that are conditional are not.
    """
    found = [body for body in loops(code) if any(one.name in products for one in body)]
    if not found:
        return None
    body = min(found, key=len)
    place = {one.at: i for i, one in enumerate(body)}
    path, i = [], 0
    while i < len(body):
        one = body[i]
        path.append(one)
        to = place.get(one.target, -1) if one.target is not None else -1
        tried_again = 0 < to - i < 9 and any(other.name == "SYNCS.PHASECHK" for other in body[i + 1 : to])
        i = to if to > i and (one.predicate is None or tried_again) else i + 1
    return path


@dataclass(frozen=True)
class _Cost:
    """unit: what issues it; busy: for so many cycles; latency: until its result is there; work: of a product, the
    cycles that its arithmetic takes, of which reading operands may make more"""

    unit: str
    busy: float
    latency: float = 0.0
    work: float = 0.0


@dataclass
class _Warp:
    program: int
    group: int
    place: int = 0
    ready: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)
    groups: deque[float] = field(default_factory=deque)
    last_product: float = 0.0
    waiting: bool = False
    ends: list[float] = field(default_factory=list)


def tensor_share(program: Program, machine: Machine) -> Share:
    """Runs the loop until it is steady."""
    step = program.step
    costs = [_cost(one, machine) for one in step]
    takes_turns = any(one.opcode.startswith("BAR.ARV") for one in step)
    warps = [_Warp(at, group) for at in range(program.programs) for group in range(program.warps)]
    units: dict[str, float] = {}
    arrived: dict[tuple[int, str], list[_Warp | None]] = {}
    if takes_turns:  # the first group need not wait for the second one's first step
        arrived = {(at, "turn 0"): [None] for at in range(program.programs)}
    spans: list[tuple[float, float, float]] = []
    order, now = list(warps), 0.0
    while min(len(warp.ends) for warp in warps) < STEPS:
        running = (warp for warp in order if not warp.waiting)
        able = [(_earliest(warp, step[warp.place], costs[warp.place], units), warp) for warp in running]
        if not able:
            raise ValueError("every warp waits at a barrier: the loop is not one that this model can follow")
        now = max(now, min(time for time, _ in able))
        warp = next(warp for time, warp in able if time <= now)
        one, cost = step[warp.place], costs[warp.place]
        order.remove(warp)
        order.append(warp)
        after = now + max(1, one.stall)
        if one.predicate not in ("!PT", "!UPT"):
            done = now + cost.latency
            if cost.work:
                start = max(units.get("tensor", 0.0), now + (4 if one.name == "HGMMA" else 0))
                units["tensor"] = start + cost.busy
                spans.append((start, start + cost.busy, cost.work))
                warp.last_product = start + cost.busy + TAIL
                if "gsb" in one.text:
                    warp.groups.append(warp.last_product)
            else:
                units[cost.unit] = now + cost.busy
            if one.releases is not None:
                warp.boards[one.releases] = max(warp.boards[one.releases], done)
            if one.releases_operands is not None:
                board = one.releases_operands
                warp.boards[board] = max(warp.boards[board], now + OPERANDS_READ)
            if one.name == "WARPGROUP.DEPBAR":
                while len(warp.groups) > _kept(one):
                    warp.groups.popleft()
            elif one.name == "BAR":
                after = _at_barrier(warp, one, program, takes_turns, arrived, now, after)
        warp.ready = after
        warp.place += 1
        if warp.place == len(step):
            warp.place = 0
            warp.ends.append(now)
        now += 1
    first, last = warps[0].ends[SKIPPED], warps[0].ends[STEPS - 1]
    inside = ((max(0.0, min(end, last) - max(start, first)) / (end - start), work) for start, end, work in spans)
    return Share(sum(part * work for part, work in inside) / (last - first), (last - first) / (STEPS - 1 - SKIPPED))


def _earliest(warp: _Warp, one: Instruction, cost: _Cost, units: dict[str, float]) -> float:
    """When the warp's next instruction can start."""
    free = 0.0 if one.name == "HGMMA" else units.get(cost.unit, 0.0)  # Hopper's tensor core has a queue
    times = [warp.ready, free, *(warp.boards[board] for board in one.waits)]
    if one.name == "WARPGROUP.DEPBAR" and len(warp.groups) > _kept(one):
        times.append(warp.groups[len(warp.groups) - _kept(one) - 1])
    return max(times)


def _kept(one: Instruction) -> int:
    """Groups of products that a wait leaves in flight."""
    return int(one.text.rsplit(",", 1)[1], 16)


def _at_barrier(
    warp: _Warp, one: Instruction, program: Program, takes_turns: bool,
    arrived: dict[tuple[int, str], list[_Warp | None]], now: float, after: float,
) -> float:  # fmt: skip
    """A warp comes to a named barrier: whoever completes it sets all free. Returns when it can go on."""
    only_arrives = one.opcode.startswith("BAR.ARV")
    threads = re.search(r",\s*(0x[0-9a-f]+)\s*$", one.text)
    members = min(program.warps, max(1, int(threads[1], 16) // 128)) if threads else program.warps
    name = re.sub(r"^.*?BAR\S*\s+", "", one.text).split(",")[0]
    if takes_turns and members > 1:
        name = f"turn {(warp.group + 1) % program.warps if only_arrives else warp.group}"
    if members == 1:
        name = f"own {warp.group}"
    here = arrived.setdefault((warp.program, name), [])
    here.append(None if only_arrives else warp)
    if len(here) < members:
        warp.waiting = not only_arrives
        return after
    for other in here:
        if other is not None:
            other.waiting, other.ready = False, now + BARRIER
    here.clear()
    return after if only_arrives else now + BARRIER


def _cost(one: Instruction, machine: Machine) -> _Cost:
    name = one.opcode.split(".")[0]
    latency = LATENCY.get(name, 0)
    if name == "HGMMA":
        rows, columns, depth = _shape(one)
        from_registers = re.search(r"GMMA\S+\s+R\d+,\s+R\d+", one.text) is not None
        read = 2 * depth * (columns + (0 if from_registers else rows))
        work = 2 * rows * columns * depth / (4 * machine.tensor)
        return _Cost("tensor", max(work, read / (4 * SHARED_BYTES)), work=work)
    if name == "HMMA":
        flop = {"16816": 4096, "1688": 2048}[one.opcode.split(".")[1]]
        return _Cost("tensor", flop / machine.tensor, work=flop / machine.tensor)
    if name == "MUFU":
        return _Cost("exponential", machine.exponential, latency)
    if name in MEMORY:
        return _Cost("memory", max(4, 32 * _bytes(one) // SHARED_BYTES), latency)
    if name in FMA:
        return _Cost("fma", machine.fma)
    if name in CONVERSIONS:
        return _Cost("conversion", machine.conversion, latency)
    if name in CONTROL:
        return _Cost("control", 1)
    if name in ("SYNCS", "UTMALDG"):
        return _Cost("copies", 2, latency)
    if name.startswith("U"):
        return _Cost("uniform", 1, latency)
    return _Cost("alu", machine.alu, latency)


def _shape(one: Instruction) -> tuple[int, ...]:
    match = re.search(r"HGMMA\.(\d+)x(\d+)x(\d+)", one.text)
    if match is None:
        raise ValueError(f"a product of unknown shape: {one.text}")
    return tuple(map(int, match.groups()))


def _bytes(one: Instruction) -> int:
    """Of shared memory, that a lane reads or writes."""
    if one.opcode.startswith(("LDSM", "STSM")):
        return 4 * int(one.opcode.rsplit(".", 1)[1]) if one.opcode[-1].isdigit() else 4
    return 16 if ".128" in one.opcode else 8 if ".64" in one.opcode else 4
