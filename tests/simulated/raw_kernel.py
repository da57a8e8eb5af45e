"""A kernel that is launched without any guard, for tests of the simulated node itself."""

from __future__ import annotations

from tests.support import interpreter

with interpreter.interpreted():
    import triton
    import triton.language as tl

    @triton.jit
    def double_kernel(out_ptr, in_ptr, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        offset = tl.arange(0, SIZE)
        tl.store(out_ptr + offset, 2 * tl.load(in_ptr + offset, mask=offset < count), mask=offset < count)
