"""The forward for Hopper with warps of different tasks, in Gluon: one copies tiles, two groups of four compute.

A program has 128 queries: those of one row of 128, or of two rows of 64 that share the tiles which both need. Keys and
values have rings of their own. Shaped after FlashAttention-3 (arXiv:2407.08608, section 3.1).

Compiled for sm90, and run against the reference by an emulator of what it uses of Gluon; no GPU has run it yet.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["warp_specialized_kernel"]

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # Triton 3.8 and newer; before


@gluon.jit
def _producer(  # type: ignore[no-untyped-def]
    k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, list_ptr, tiles
):
    """Fetches the program's tiles in turn, as slots become empty."""
    BLOCK_K: gl.constexpr = k_smem.shape[1]
    STAGES: gl.constexpr = k_smem.shape[0]
    block = gl.load(list_ptr)
    for i in range(tiles):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        coming = gl.load(list_ptr + gl.minimum(i + 1, tiles - 1))
        mbarrier.wait(k_empty.index(slot), phase ^ 1)
        mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
        copy_tile(k_desc, [block * BLOCK_K, 0], k_full.index(slot), k_smem.index(slot))
        mbarrier.wait(v_empty.index(slot), phase ^ 1)
        mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
        copy_tile(v_desc, [block * BLOCK_K, 0], v_full.index(slot), v_smem.index(slot))
        block = coming


@gluon.jit
def _weights(scores, top, total, scale_log2):  # type: ignore[no-untyped-def]
    """Online softmax of one tile in base 2."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - new_top[:, None])
    decay = gl.exp2(top - new_top)
    return weights, decay, new_top, total * decay + gl.sum(weights, 1)


@gluon.jit
def _pass(first, last, STAGES: gl.constexpr, k_full, k_empty, v_full, v_empty):  # type: ignore[no-untyped-def]
    """Gives back tiles first … last − 1, which only the other group needs, once they have arrived.

    Not before: a barrier tells only odd phases from even ones, so a group may never be two phases behind.
    """
    for i in range(first, last):
        slot = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot), count=1)


@gluon.jit
def _steps(  # type: ignore[no-untyped-def]
    first, last, passed, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn_ptr, list_ptr, length_ptr,
    acc, top, total, scale_log2, MASKED: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Attends to blocks first … last − 1 of a group's own.

    A slot is given back before the group waits for another one: else a group that passes many tiles would keep the one
    that the producer needs to get to the group's next.

    Args:
        passed: Tiles so far.
        turn_ptr: int32, each block's place among the program's tiles.
    """
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_K: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    zero = gl.zeros([64, BLOCK_K], gl.float32, s_layout)
    for j in range(first, last):
        turn = j
        if PAIRED:
            turn = gl.load(turn_ptr + j)
            _pass(passed, turn, STAGES, k_full, k_empty, v_full, v_empty)
            passed = turn + 1
        slot = turn % STAGES
        phase = (turn // STAGES) & 1
        mbarrier.wait(k_full.index(slot), phase)
        scores = warpgroup_mma(q, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            real = gl.load(length_ptr + gl.load(list_ptr + turn))
            keys = gl.arange(0, BLOCK_K, gl.SliceLayout(0, s_layout))
            scores = gl.where((keys < real)[None, :], scores, float("-inf"))
        weights, decay, top, total = _weights(scores, top, total, scale_log2)
        p = gl.convert_layout(weights.to(k_smem.dtype), p_layout)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, o_layout))[:, None]
        mbarrier.wait(v_full.index(slot), phase)
        acc = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(slot), count=1)
    return passed, acc, top, total


@gluon.jit
def _group(  # type: ignore[no-untyped-def]
    GROUP: gl.constexpr, PAIRED: gl.constexpr, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    list_ptr, tiles, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr, row, scale_log2,
):  # fmt: skip
    """Four warps with 64 queries: row `row` of 64, or half GROUP of row `row` of 128."""
    BLOCK_K: gl.constexpr = k_smem.shape[1]
    D: gl.constexpr = k_smem.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_K, 16]
    )
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q = q_smem.index(GROUP)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
    total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
    acc = gl.zeros([64, D], gl.float32, o_layout)
    full = gl.load(full_ptr)
    passed, acc, top, total = _steps(
        0, full, gl.to_tensor(0), q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn_ptr, list_ptr, length_ptr,
        acc, top, total, scale_log2, False, PAIRED,
    )  # fmt: skip
    passed, acc, top, total = _steps(
        full, gl.load(own_ptr), passed, q, k_smem, v_smem, k_full, k_empty, v_full, v_empty, turn_ptr, list_ptr,
        length_ptr, acc, top, total, scale_log2, True, PAIRED,
    )  # fmt: skip
    if PAIRED:
        _pass(passed, tiles, k_smem.shape[0], k_full, k_empty, v_full, v_empty)
    empty = total == 0.0
    safe = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("-inf"), (top + gl.log2(safe)) * 0.6931471805599453)
    acc = acc * gl.convert_layout(1.0 / safe, gl.SliceLayout(1, o_layout))[:, None]
    first = row * 64 if PAIRED else row * 128 + GROUP * 64
    place = first + gl.arange(0, 64, gl.SliceLayout(1, o_layout)).to(gl.int64)
    width = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    gl.store(out_ptr + place[:, None] * D + width[None, :], acc.to(out_ptr.dtype.element_ty))
    gl.store(lse_ptr + first + gl.arange(0, 64, gl.SliceLayout(1, s_layout)).to(gl.int64), lse)


@gluon.jit
def _first(  # type: ignore[no-untyped-def]
    PAIRED: gl.constexpr, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    list_ptr, tiles, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr, row, scale_log2,
):  # fmt: skip
    _group(
        0, PAIRED, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
        list_ptr, tiles, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr, row, scale_log2,
    )  # fmt: skip


@gluon.jit
def _second(  # type: ignore[no-untyped-def]
    PAIRED: gl.constexpr, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
    list_ptr, tiles, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr, row, scale_log2,
):  # fmt: skip
    _group(
        1, PAIRED, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty,
        list_ptr, tiles, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr, row, scale_log2,
    )  # fmt: skip


@gluon.jit
def warp_specialized_kernel(  # type: ignore[no-untyped-def]
    q_desc, k_desc, v_desc, rows_ptr, list_ptr, tiles_ptr, turn_ptr, own_ptr, full_ptr, length_ptr, out_ptr, lse_ptr,
    list_width, turn_width, scale_log2, PAIRED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One program: a row of 128 queries, or (PAIRED) two of 64; see `hopper_attention` for the arguments.

    Args:
        q_desc, k_desc, v_desc: Of [rows · block_q, D] and [blocks · block_k, D], with tiles of 64 and of block_k.
        rows_ptr: int32, the row, or the two rows, of each program.
        own_ptr, full_ptr: int32[rows], blocks of each row, full ones first.
        list_ptr: int32[., list_width], a row's blocks; PAIRED: by program those of its rows.
        tiles_ptr: int32, how many there are.
        turn_ptr: int32[programs · 2, turn_width], places of the rows' blocks in their program's list, if PAIRED.
    """
    program = gl.program_id(0)
    if PAIRED:
        first = gl.load(rows_ptr + 2 * program).to(gl.int64)
        second = gl.load(rows_ptr + 2 * program + 1).to(gl.int64)
        listed = program.to(gl.int64)
        first_place, second_place = first * 64, second * 64
    else:
        first = gl.load(rows_ptr + program).to(gl.int64)
        second = first
        listed = first
        first_place, second_place = first * 128, first * 128 + 64
    tiles = gl.load(tiles_ptr + listed)
    list_ptr += listed * list_width
    D: gl.constexpr = q_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = k_desc.block_type.shape[0]
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, BLOCK_K, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [STAGES, BLOCK_K, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=2)
        mbarrier.init(v_empty.index(slot), count=2)
    fence_async_shared()
    mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
    copy_tile(q_desc, [first_place.to(gl.int32), 0], q_full.index(0), q_smem.index(0))
    copy_tile(q_desc, [second_place.to(gl.int32), 0], q_full.index(0), q_smem.index(1))
    mbarrier.wait(q_full.index(0), 0)
    gl.warp_specialize(
        [
            (_first, (
                PAIRED, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, list_ptr, tiles,
                turn_ptr + listed * 2 * turn_width, own_ptr + first, full_ptr + first, length_ptr, out_ptr, lse_ptr,
                first, scale_log2,
            )),
            (_second, (
                PAIRED, q_smem, k_smem, v_smem, k_full, k_empty, v_full, v_empty, list_ptr, tiles,
                turn_ptr + (listed * 2 + 1) * turn_width, own_ptr + second, full_ptr + second, length_ptr, out_ptr,
                lse_ptr, second, scale_log2,
            )),
            (_producer, (
                k_desc, v_desc, k_smem, v_smem, k_full, k_empty, v_full, v_empty, list_ptr, tiles,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
