"""The reader of machine code and its cycle model on listings that were written by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from scripts.checks.machine_code.cycles import Program, tensor_share
from scripts.checks.machine_code.machines import MACHINES
from scripts.checks.machine_code.reading import program_from
from scripts.checks.machine_code.sass import Instruction, in_flight_at_exponentials, instructions, loops

H100 = next(machine for machine in MACHINES if machine.name == "H100")
A100 = next(machine for machine in MACHINES if machine.name == "A100")
PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
WAIT_ALL, WAIT_OLDER = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1"


def listing(*texts: str, stall: int = 1) -> str:
    """As cuobjdump prints a kernel: texts between an entry and an exit, nothing released or waited for."""
    lines = ["\t\tFunction : kernel"]
    for i, text in enumerate(["NOP", *texts, "EXIT"]):
        high = (stall | 7 << 5 | 7 << 8) << 41
        lines += [f"        /*{16 * i:04x}*/                   {text} ;    /* 0x{0:016x} */"]
        lines += [f"                                           /* 0x{high:016x} */"]
    return "\n".join(lines)


def loop(*texts: str) -> str:
    return listing(*texts, "@P0 BRA 0x10")


def test_control_bits():
    high = (5 | 2 << 5 | 7 << 8 | 0b100001 << 11) << 41
    text = f"  /*0100*/  @!P1 LDS.128 R4, [R2] ;  /* 0x{1:016x} */\n   /* 0x{high:016x} */\n"
    (one,) = instructions(text)
    assert one == Instruction(256, "@!P1 LDS.128 R4, [R2]", 5, releases=2, releases_operands=None, waits=(0, 5))
    assert (one.predicate, one.opcode, one.name) == ("!P1", "LDS.128", "LDS")


def test_local_memory_in_a_loop_is_told_from_that_before_it():
    def in_loops(sass):
        return [one.name for body in loops(instructions(sass)) for one in body if one.name in ("LDL", "STL")]

    assert in_loops(listing("FADD R1, R1, R2", "LDL R5, [R1]", "@P0 BRA 0x10")) == ["LDL"]
    assert in_loops(listing("LDL R5, [R1]", "FADD R1, R1, R2", "@P0 BRA 0x20")) == []


def test_a_jump_back_over_the_exit_is_no_loop():
    code = instructions(listing("FADD R1, R1, R2", "EXIT", "LDL R5, [R1]", "BRA 0x10"))
    assert loops(code) == []


@pytest.mark.parametrize(("wait", "left"), [(WAIT_ALL, 0), (WAIT_OLDER, 4)])
def test_products_in_flight_while_exponentials_run(wait, left):
    group = [*[PRODUCT] * 3, f"{PRODUCT}, gsb0"]
    code = instructions(loop(*group, wait, "MUFU.EX2 R1, R2"))
    (body,) = loops(code)
    assert in_flight_at_exponentials(body) == left


SOFTMAX = ["MUFU.EX2 R1, R2"] * 32


def share(*texts: str, threads: int = 128, programs: int = 1, machine=H100) -> float:
    return tensor_share(program_from(loop(*texts), threads, programs), machine).tensor


def test_an_early_wait_costs_the_exponentials_that_it_leaves_alone():
    group = [*[PRODUCT] * 7, f"{PRODUCT}, gsb0"]
    late, early = share(*group, *SOFTMAX, WAIT_ALL), share(*group, WAIT_ALL, *SOFTMAX)
    # 8 products of 64 cycles; 32 exponentials of 8: beside the products, or after them
    assert early == pytest.approx(512 / (512 + 256), abs=0.06)
    assert late == pytest.approx(1, abs=0.08)


def test_a_second_program_hides_what_one_leaves_open():
    group = [*[PRODUCT] * 7, f"{PRODUCT}, gsb0", WAIT_ALL, *SOFTMAX]
    assert share(*group, programs=2) > share(*group) + 0.2


def test_groups_that_take_turns_are_half_a_step_apart():
    """Two groups that both wait for all at one barrier go in step; told to take turns they hide each other."""
    group = [*[PRODUCT] * 7, f"{PRODUCT}, gsb0"]
    together = ["BAR.SYNC.DEFER_BLOCKING 0x0", *group, WAIT_ALL, *SOFTMAX]
    turns = ["BAR.SYNC.DEFER_BLOCKING R5, 0x100", *group, "BAR.ARV R5, 0x100", WAIT_ALL, *SOFTMAX]
    assert share(*turns, threads=256) > share(*together, threads=256) + 0.1


def test_a_scoreboard_is_waited_for():
    free = Instruction(0, "LDS R1, [R2]", releases=0)
    step = [free, Instruction(16, "FADD R3, R1, R1"), Instruction(32, "HMMA.16816.F32.BF16 R8, R4, R6, R8")]
    waiting = [free, Instruction(16, "FADD R3, R1, R1", waits=(0,)), step[2]]
    quick, slow = (tensor_share(Program(of, 1, 1), A100).cycles for of in (step, waiting))
    assert slow - quick >= 20


def test_reading_operands_from_shared_memory_bounds_narrow_products():
    narrow = [
        *["HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24"] * 31,
        "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
    ]
    from_registers = [text.replace("gdesc[UR4]", "R4, gdesc[UR4]") for text in narrow]
    assert share(*narrow, programs=2) == pytest.approx(16 / 24, abs=0.02)
    assert share(*from_registers, programs=2) == pytest.approx(1, abs=0.03)


def test_a_loop_without_products_is_refused():
    with pytest.raises(ValueError, match="no loop with products"):
        program_from(loop("FADD R1, R1, R2"), 128, 1)
