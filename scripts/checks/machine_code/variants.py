"""Variants of db-SP's Triton kernels that a plan can meet, the launch that compiles each, and its record."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton

from dbsp_kernels.exchange import row_words
from dbsp_kernels.inputs import BackwardInputs, KernelInputs
from dbsp_kernels.row_parts import RowParts, most_added_parts
from dbsp_kernels.segments import CopySegments
from dbsp_kernels.triton.backward import triton_attention_backward
from dbsp_kernels.triton.exchange import (
    triton_copy_segments,
    triton_copy_to_both,
    triton_quantise_segments,
    triton_rotate_segments,
)
from dbsp_kernels.triton.forward import triton_attention, triton_int8_attention
from dbsp_kernels.triton.int8 import quantise_blocks
from dbsp_kernels.triton.merge import triton_merge_into
from dbsp_kernels.triton.prediction import (
    pool_rows_triton,
    pooled_scores_triton,
    select_blocks_triton,
    sum_tokens_triton,
)
from dbsp_kernels.triton.schedule import triton_cut_rows, triton_order_rows
from dbsp_kernels.triton.tables import triton_expand_rows, triton_pack_rows
from scripts.checks.machine_code.launches import compiled_launches
from scripts.checks.machine_code.reading import findings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHIPPED = (
    *((block_q, block_k, head_dim) for head_dim in (128, 64) for block_q in (64, 128) for block_k in (64, 128)),
    *((120, 120, 128), (102, 102, 64)),  # window tiles of Wan2.1 and CogVideoX1.5
    *((64, 64, 24), (32, 32, 24), (21, 21, 24), (16, 16, 24)),  # of tiny models
    *((64, 64, 16), (16, 16, 16), (15, 15, 16)),
)
"""(block_q, block_k, D) of shipped configurations and mask sources' defaults; tests compile them for sm80 to sm120."""

SELECTIONS = tuple(f"{rule} of {blocks}" for rule in ("cdf", "count") for blocks in (48, 1182, 5000))
ROWS, BLOCKS, HEADS, TOKENS, SLOTS = 1182, 1182, 5, 75_600, 132
"""A head of Wan2.1-14B at 720p in blocks of 64, the heads of a rank of eight, and what an H100 computes at a time.
Only what they are multiples of, and how many blocks a row is chosen among, is seen in machine code."""


@dataclass(frozen=True)
class Variant:
    """One kernel as one launch compiles it."""

    kernel: str
    arch: int  # 90 for Hopper
    block_q: int = 0  # and block_k: 0 where the code is the same for all
    block_k: int = 0
    head_dim: int = 128  # D; 0 where the kernel has none
    dtype: str = "bf16"  # of tokens
    case: str = ""  # what else distinguishes launches of the kernel


@dataclass(frozen=True)
class Kernel:
    """One kernel and its variants."""

    function: str  # name of the function that Triton compiles, without leading underscores
    launch: Callable[[Variant], object]  # launches it once on tensors without memory
    cases: tuple[str, ...] = ("",)  # values of `Variant.case`
    shapes: tuple[tuple[int, int, int], ...] = SHIPPED  # (block_q, block_k, D) of its variants
    dtypes: tuple[str, ...] = tuple(DTYPES)  # names in `DTYPES`, or "-" where the kernel has no tokens


def shipped(arch: int) -> Iterator[Variant]:
    """Yields everything that shipped configurations use, in all dtypes."""
    for name, kernel in KERNELS.items():
        for shape, dtype, case in itertools.product(kernel.shapes, kernel.dtypes, kernel.cases):
            yield Variant(name, arch, *shape, dtype, case)


def reported(variant: Variant) -> dict[str, Any]:
    """Returns the record of a variant, or of its failure."""
    try:
        return examined(variant)
    except Exception as error:  # for any compilers or the reading raise: the other variants don't depend on it
        said = " ".join(str(error).split())
        return _named(variant) | {"remark": f"failed: {type(error).__name__}: {said}", "failed": True}


def examined(variant: Variant) -> dict[str, Any]:
    """Compiles the variant by the installed Triton. What is counted of a step is None if there is none."""
    kernel = KERNELS[variant.kernel]
    compiled = compiled_launches(lambda: kernel.launch(variant), variant.arch, kernel.function)
    if len(compiled) != 1:
        raise ValueError(f"the launch compiled {len(compiled)} kernels {kernel.function}, and not one")
    found = findings(compiled[0], variant.arch)
    return _named(variant) | found | {"remark": "no tensor cores" if found["products"] is None else ""}


def _named(variant: Variant) -> dict[str, Any]:
    return {"triton": triton.__version__, **asdict(variant)}


def _tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype)


def inputs_of(of: Variant) -> KernelInputs:
    dtype = DTYPES[of.dtype]
    partial = parts = None
    if of.case.startswith("ring"):
        partial = _tensor(ROWS, of.block_q, of.head_dim, dtype=torch.float32), _tensor(ROWS, of.block_q).float()
    if of.case.endswith("parts"):
        added = most_added_parts(SLOTS)
        parts = RowParts(_tensor(ROWS + added, 5), _tensor(added, 3))
    return KernelInputs(
        _tensor(ROWS, of.block_q, of.head_dim, dtype=dtype),
        _tensor(BLOCKS, of.block_k, of.head_dim, dtype=dtype),
        _tensor(BLOCKS, of.block_k, of.head_dim, dtype=dtype),
        _tensor(ROWS, BLOCKS),
        _tensor(ROWS),
        _tensor(BLOCKS),
        of.head_dim**-0.5,
        kv_full=_tensor(ROWS),
        row_schedule=_tensor(ROWS),
        partial=partial,
        parts=parts,
    )


def _backward(of: Variant) -> None:
    given = inputs_of(of)
    table = _tensor(BLOCKS, ROWS), _tensor(BLOCKS), _tensor(BLOCKS)
    lse = _tensor(ROWS, of.block_q, dtype=torch.float32)
    triton_attention_backward(BackwardInputs(given, given.q, given.q, lse, lambda: table))


def _quantise_blocks(of: Variant) -> None:
    quantise_blocks(_tensor(BLOCKS, int(of.case), of.head_dim, dtype=DTYPES[of.dtype]), _tensor(BLOCKS))


def _sum_tokens(of: Variant) -> None:
    tokens = _tensor(1, TOKENS, HEADS, of.head_dim, dtype=DTYPES[of.dtype]).transpose(1, 2)  # as models have them
    position, first = _tensor(TOKENS, dtype=torch.int64), _tensor(BLOCKS + 1, dtype=torch.int64)
    sums = _tensor(HEADS, 1, 2 * BLOCKS, 2 * of.head_dim + 2, dtype=torch.int64)
    sum_tokens_triton(tokens, position, first, sums, _tensor(BLOCKS, dtype=torch.int64))


def _pool_rows(of: Variant) -> None:
    sums = _tensor(HEADS, 1, BLOCKS, 2 * of.head_dim, dtype=torch.int64)
    pool_rows_triton(sums, _tensor(BLOCKS, dtype=torch.int64))


def _scores(of: Variant) -> None:
    pooled_scores_triton(
        _tensor(HEADS, 2 * BLOCKS, of.head_dim + 1, dtype=torch.float32), BLOCKS, of.head_dim**-0.5, 0.5
    )


def _select(of: Variant) -> None:
    rule, _, blocks = of.case.partition(" of ")
    chance = _tensor(HEADS, BLOCKS, int(blocks), dtype=torch.float64)
    dense = _tensor(HEADS, BLOCKS + int(blocks), dtype=torch.bool)
    select_blocks_triton(chance, dense, 0.9 if rule == "cdf" else None, 100)


def _merge(of: Variant) -> None:
    out, lse = _tensor(ROWS * 64, of.head_dim, dtype=torch.float32), _tensor(ROWS * 64, dtype=torch.float32)
    triton_merge_into(out, lse, _tensor(ROWS * 64, of.head_dim, dtype=DTYPES[of.dtype]), lse.clone())


def _merge_parts(of: Variant) -> None:
    triton_attention(inputs_of(replace(of, block_q=64, block_k=64, case=f"{of.case} parts")))


def _copy(of: Variant) -> None:
    tokens = _tensor(1, TOKENS, HEADS, of.head_dim, dtype=DTYPES[of.dtype]).transpose(1, 2)
    mean, sources = 1.0 if of.case == "tokens" else 64.0, 3 if of.case == "q, k, v" else 1
    triton_copy_segments(
        [tokens] * sources, tokens.contiguous(), [CopySegments(_tensor(5000, 6), mean)] * sources, of.case == "added"
    )


def _copy_to_both(of: Variant) -> None:
    buffer = _tensor(TOKENS * HEADS, 1, of.head_dim, dtype=DTYPES[of.dtype])
    packed_q = _tensor(1, 1, TOKENS, of.head_dim, dtype=DTYPES[of.dtype])
    packed_kv = _tensor(2, 1, TOKENS, of.head_dim, dtype=DTYPES[of.dtype]).transpose(0, 1)
    triton_copy_to_both(buffer, [packed_q, packed_kv], [CopySegments(_tensor(5000, 6), 64.0)] * 2)


def _quantise(of: Variant) -> None:
    mean = 1.0 if of.case == "tokens" else 64.0
    tokens = _tensor(1, TOKENS, HEADS, of.head_dim, dtype=DTYPES[of.dtype]).transpose(1, 2)
    buffer = _tensor(TOKENS * HEADS, 1, row_words(of.head_dim)).transpose(0, 1)[:, None]
    less = _tensor(1, HEADS, of.head_dim, dtype=torch.float32) if of.case == "less a mean" else None
    triton_quantise_segments(tokens, buffer, CopySegments(_tensor(5000, 6), mean), less, of.case != "output")


def _rotate(of: Variant) -> None:
    dtype = DTYPES[of.dtype]
    came = _tensor(TOKENS * HEADS, 1, of.head_dim, dtype=dtype)
    if of.case == "rows":
        came = _tensor(TOKENS * HEADS, 1, row_words(of.head_dim))
    local = _tensor(1, TOKENS, HEADS, of.head_dim, dtype=dtype).transpose(1, 2)
    triton_rotate_segments(came, local, CopySegments(_tensor(5000, 6), 1.0 if of.case == "tokens" else 64.0))


def _expand(of: Variant) -> None:
    bits = _tensor(1, ROWS, -(-BLOCKS // 8), dtype=torch.uint8)
    triton_expand_rows(bits, _tensor(1, ROWS), _tensor(BLOCKS), _tensor(2), _tensor(1, ROWS), BLOCKS, 64, 1)


def _pack(of: Variant) -> None:
    columns = _tensor(1, HEADS, BLOCKS, dtype=torch.int64)
    here = _tensor(1, HEADS, BLOCKS, dtype=torch.bool)
    rows = _tensor(ROWS, dtype=torch.int64)
    triton_pack_rows(_tensor(ROWS, BLOCKS, dtype=torch.bool), rows, rows, columns, here, here)


def _order(of: Variant) -> None:
    triton_order_rows(_tensor(1, ROWS), _tensor(ROWS, dtype=torch.int64), SLOTS, 1)


def _cut(of: Variant) -> None:
    triton_cut_rows(_tensor(1, ROWS), _tensor(1, ROWS), _tensor(ROWS, dtype=torch.int64), SLOTS, 1)


OF_HEADS, OF_ALL = ((0, 0, 128), (0, 0, 64)), ((0, 0, 0),)
"""Shapes of kernels whose code depends on D alone, and on none."""
CASES = "", "ring", "parts", "ring, parts"
KERNELS = {
    "triton": Kernel("forward_kernel", lambda of: triton_attention(inputs_of(of)), CASES),
    "triton-int8": Kernel("forward_kernel", lambda of: triton_int8_attention(inputs_of(of)), CASES),
    "triton-dq": Kernel("backward_rows_kernel", _backward),
    "triton-dkv": Kernel("backward_keys_kernel", _backward),
    "sum-tokens": Kernel("sum_kernel", _sum_tokens, shapes=OF_HEADS),
    "copy": Kernel("copy_kernel", _copy, ("blocks", "tokens", "added", "q, k, v"), OF_HEADS),
    "copy-to-both": Kernel("copy_kernel", _copy_to_both, shapes=OF_HEADS),
    "merge": Kernel("merge_kernel", _merge, shapes=OF_HEADS),
    "merge-parts": Kernel("merge_parts_kernel", _merge_parts, ("", "ring"), OF_HEADS),
    "quantise": Kernel("quantise_kernel", _quantise, ("blocks", "tokens", "less a mean", "output"), OF_HEADS),
    "rotate": Kernel("rotate_kernel", _rotate, ("blocks", "tokens", "rows"), OF_HEADS),
    "quantise-blocks": Kernel("quantise_blocks_kernel", _quantise_blocks, ("64", "128"), OF_HEADS),
    "pool-rows": Kernel("pool_kernel", _pool_rows, shapes=OF_HEADS, dtypes=("-",)),
    "scores": Kernel("score_kernel", _scores, shapes=OF_HEADS, dtypes=("-",)),
    "select": Kernel("select_kernel", _select, SELECTIONS, OF_ALL, ("-",)),
    "expand-rows": Kernel("expand_kernel", _expand, shapes=OF_ALL, dtypes=("-",)),
    "pack-rows": Kernel("pack_kernel", _pack, shapes=OF_ALL, dtypes=("-",)),
    "row-keys": Kernel("key_kernel", _order, shapes=OF_ALL, dtypes=("-",)),
    "row-order": Kernel("position_kernel", _order, shapes=OF_ALL, dtypes=("-",)),
    "row-parts": Kernel("position_kernel", _cut, shapes=OF_ALL, dtypes=("-",)),
    "row-items": Kernel("items_kernel", _cut, shapes=OF_ALL, dtypes=("-",)),
}
ATTENTION = ("triton", "triton-int8", "triton-dq", "triton-dkv")
