"""What GPUs can do in a cycle: limits of a multiprocessor, and rates for the cycle model, each with its source.

Sources: [G] CUDA C++ Programming Guide, "Compute Capabilities" (limits) and "Arithmetic Instructions" (operations a
cycle and multiprocessor). [D] The GPU's data sheet or white paper: dense 16-bit rate with fp32 sums, over
multiprocessors and boost clock.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MACHINES", "MULTIPROCESSORS", "Machine", "Multiprocessor"]


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one multiprocessor.

    Attributes:
        shared: Bytes for all programs together, of which each takes 1 KB more than it asks for.
    """

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
"""By architecture [G]."""


@dataclass(frozen=True)
class Machine:
    """Rates of a quarter of a multiprocessor: one scheduler, with a fourth of its units.

    Attributes:
        arch: 90 for Hopper.
        tensor: FLOP a cycle of its tensor core, 16-bit operands and fp32 sums.
        fma, alu, conversion, exponential: Cycles that an instruction of 32 lanes keeps its unit.
        source: Where `tensor` comes from.
    """

    name: str
    arch: int
    tensor: int
    source: str
    fma: int = 1
    alu: int = 2
    conversion: int = 2
    exponential: int = 8


MACHINES = (
    Machine("A100", 80, 512, "[D] 312 TFLOP/s, 108 at 1.41 GHz", fma=2),  # [G]: 64 fused multiply-adds, elsewhere 128
    Machine("A40", 86, 256, "[D] 150 TFLOP/s, 84 at 1.74 GHz"),
    Machine("RTX 3090", 86, 128, "[D] 71 TFLOP/s, 82 at 1.70 GHz"),
    Machine("L40S", 89, 256, "[D] 362 TFLOP/s, 142 at 2.52 GHz"),
    Machine("RTX 4090", 89, 128, "[D] 165 TFLOP/s, 128 at 2.52 GHz"),
    Machine("H100", 90, 1024, "[D] 989 TFLOP/s, 132 at 1.83 GHz"),
    Machine("RTX PRO 6000", 120, 256, "[D] 504 TFLOP/s, 188 at 2.6 GHz"),
    Machine("RTX 5090", 120, 128, "[D] 210 TFLOP/s, 170 at 2.41 GHz"),
)
