"""What was found of one variant or reference, as one record of a table; a failure is a record, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import triton

from scripts.checks.machine_code import flash_attention
from scripts.checks.machine_code.compiler import disassembled
from scripts.checks.machine_code.cycles import Program, tensor_share
from scripts.checks.machine_code.machines import MACHINES
from scripts.checks.machine_code.reading import Step, findings, program_from, program_of
from scripts.checks.machine_code.sass import in_flight_at_exponentials
from scripts.checks.machine_code.variants import Variant, compiled

__all__ = ["Reference", "Task", "examined", "failed", "references", "reported"]


@dataclass(frozen=True)
class Reference:
    """Machine code of others that the cycle model compares ours with.

    Attributes:
        threads, programs: Of a program, and how many of them fit a multiprocessor.
        file: A cubin, or what cuobjdump -sass says of one; None: flash-attn-4's dense forward, compiled here.
        overlap: Of that kernel, whether a group's softmax runs beside its own products.
    """

    name: str
    arch: int
    threads: int
    programs: int
    file: Path | None = None
    overlap: bool = True


Task = Variant | Reference


def references(arch: int) -> list[Task]:
    """Our plain dense kernel, and FlashAttention-4's where it is installed; none where the model has no machine."""
    if not any(machine.arch == arch for machine in MACHINES):
        return []
    tiles = ((128, 128), (128, 64)) if arch == 90 else ((128, 64), (64, 64))
    found: list[Task] = [Variant("dense-reference", arch, *tile) for tile in tiles]
    if flash_attention.installed() and arch == 90:
        found += [Reference("fa4", 90, 384, 1), Reference("fa4-no-overlap", 90, 384, 1, overlap=False)]
    if flash_attention.installed() and arch == 80:
        found += [Reference("fa4", 80, 128, 2)]
    return found


def reported(task: Task, cycles: bool) -> dict[str, Any]:
    """What was found, or why there is nothing to say."""
    try:
        return examined(task, cycles)
    except Exception as error:  # whatever the compilers or the reading raise: the other variants don't depend on it
        return failed(task, error)


def examined(task: Task, cycles: bool = False) -> dict[str, Any]:
    """The variant and what was found of it. What is counted of a step is None where there is none.

    Args:
        cycles: Whether to run the cycle model, too: {machine: {"tensor": share of its time, "cycles": of a step}}.
    """
    if isinstance(task, Reference):
        return _named(task) | _of_reference(task)
    made = compiled(task)
    found = asdict(findings(made, task.arch))
    step = found.pop("step")
    counted = step or dict.fromkeys(field.name for field in fields(Step))
    record = _named(task) | counted | found | {"remark": "" if step else "no tensor cores"}
    if cycles and step and step["exponentials"]:
        record["modelled"] = _shares(task.arch, lambda: program_of(made, task.arch))
    return record


def failed(task: Task, error: BaseException) -> dict[str, Any]:
    """The record of a variant that could not be compiled or read."""
    said = " ".join(str(error).split())
    return _named(task) | {"remark": f"failed: {type(error).__name__}: {said}", "failed": True}


def _of_reference(of: Reference) -> dict[str, Any]:
    if of.file is None:
        sass = disassembled(flash_attention.machine_code(of.arch, of.overlap))
    else:
        content = of.file.read_bytes()
        sass = disassembled(content) if content.startswith(b"\x7fELF") else content.decode()
    program = program_from(sass, of.threads, of.programs)
    return {
        "in_flight": in_flight_at_exponentials(program.step), "instructions": len(program.step),
        "programs_per_multiprocessor": of.programs, "modelled": _shares(of.arch, lambda: program),
        "remark": "reference",
    }  # fmt: skip


def _shares(arch: int, program: Callable[[], Program]) -> dict[str, dict[str, float]]:
    machines = [machine for machine in MACHINES if machine.arch == arch]
    if not machines:
        return {}  # tensor memory (sm100 and its kin), or no data sheet
    given = program()
    shares = ((machine.name, tensor_share(given, machine)) for machine in machines)
    return {name: {"tensor": round(one.tensor, 3), "cycles": round(one.cycles)} for name, one in shares}


def _named(task: Task) -> dict[str, Any]:
    if isinstance(task, Reference):
        return {"triton": None, "kernel": task.name, "arch": task.arch, "block_q": 0, "block_k": 0, "width": 128,
                "dtype": "bf16", "case": task.file.name if task.file else ""}  # fmt: skip
    return {"triton": triton.__version__, **asdict(task)}
