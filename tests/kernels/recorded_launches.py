"""Records launches of our Triton kernels without a GPU, in a process in which they are not interpreted.

Prints, as JSON, the kernels that were launched outside their tensors' device, and how many variants of each kernel are
compiled for one dtype, head size and block size while numbers of rows, blocks, heads, segments and items vary.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction, compute_cache_key

from dbsp_kernels.exchange import row_words
from dbsp_kernels.inputs import BackwardInputs, KernelInputs
from dbsp_kernels.row_parts import RowParts
from dbsp_kernels.segments import CopySegments
from dbsp_kernels.triton.backward import triton_attention_backward
from dbsp_kernels.triton.exchange import (
    triton_copy_segments,
    triton_copy_to_both,
    triton_quantise_segments,
    triton_rotate_segments,
)
from dbsp_kernels.triton.forward import triton_attention, triton_int8_attention
from dbsp_kernels.triton.merge import triton_merge_into
from dbsp_kernels.triton.prediction import (
    pool_rows_triton,
    pooled_scores_triton,
    select_blocks_triton,
    sum_tokens_triton,
)
from dbsp_kernels.triton.schedule import triton_cut_rows, triton_order_rows
from dbsp_kernels.triton.tables import triton_expand_rows, triton_pack_rows
from scripts.checks.machine_code.launches import gpu_of

SIZES = (1, 7, 48)
WIDTH, BLOCK, HEADS = 128, 64, 5
MEANS = (1.0, 2.4, 9.0, 20.0, 40.0, 64.0)


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's name, what it is compiled for, and whether its tensors' device was made current."""

    kernel: str
    variant: str
    on_device: bool


@contextlib.contextmanager
def recorded(arch: int) -> Iterator[list[Launch]]:
    """Makes tensors without memory seem to be on a GPU; adds launches to the list instead of compiling them."""
    found: list[Launch] = []
    entered: list[torch.device] = []

    @contextlib.contextmanager
    def device(index: Any) -> Iterator[None]:
        entered.append(torch.device(index))
        yield
        entered.pop()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        options["debug"] = options.get("debug", self.debug) or False
        options["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        options["fpsan_homomorphic_casts"] = knobs.compilation.fpsan_homomorphic_casts
        _, keys, *_, binder = self.device_caches[driver.active.get_current_device()]
        _, specialization, options = binder(*args, **options)
        tensors = {argument.device for argument in args if isinstance(argument, torch.Tensor)}
        variant = compute_cache_key(keys, specialization, options)
        found.append(Launch(self.fn.__name__.lstrip("_"), str(variant), {*entered[-1:]} == tensors))

    def address(self: torch.Tensor) -> int:
        return self.storage_offset() * self.element_size()

    with (
        gpu_of(arch),
        mock.patch.object(torch.cuda, "device", device),
        mock.patch.object(JITFunction, "run", record),
        mock.patch.object(FakeTensor, "data_ptr", address),
        FakeTensorMode(),
    ):
        yield found


def table(*shape: int, offset: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Returns a table that starts `offset` elements behind an aligned address, as parts of larger tables do."""
    return torch.empty(torch.Size(shape).numel() + offset, dtype=dtype)[offset:].view(shape)


def attend(rows: int, blocks: int, offset: int) -> None:
    q, k = table(rows, BLOCK, WIDTH, dtype=torch.bfloat16), table(blocks, BLOCK, WIDTH, dtype=torch.bfloat16)
    names = ("kv_count", "kv_full", "row_schedule")
    tables = {name: table(rows, offset=offset) for name in names} | {"kv_len": table(blocks, offset=offset)}
    plain = KernelInputs(q, k, k, table(rows, blocks, offset=offset), scale=0.1, **tables)
    partial = table(rows, BLOCK, WIDTH, dtype=torch.float32), table(rows, BLOCK, offset=offset, dtype=torch.float32)
    wide = {"out_dtype": torch.float32}
    for options in ({}, wide, {"partial": partial}, {"partial": partial, "out_dtype": torch.bfloat16}):
        triton_attention(KernelInputs(**(vars(plain) | options)))
        triton_int8_attention(KernelInputs(**(vars(plain) | options)))
        cut = RowParts(table(rows + 9, 5, offset=offset), table(9, 3, offset=offset))
        triton_attention(KernelInputs(**(vars(plain) | options | {"parts": cut})))
    turned = table(blocks, rows, offset=offset), table(blocks, offset=offset), table(blocks, offset=offset)
    triton_attention_backward(BackwardInputs(plain, q, q, partial[1], lambda: turned))
    triton_merge_into(*partial, q, partial[1])


def make_tables(rows: int, blocks: int, offset: int) -> None:
    chunks, batch = 1 + rows % 3, 1 + rows % 2
    bits = table(chunks, rows, -(-blocks // 8), offset=offset, dtype=torch.uint8)
    base, count, full = (table(chunks, rows, offset=offset) for _ in range(3))
    kv_len, bounds = table(chunks * blocks, offset=offset), table(chunks + 1, offset=offset)
    triton_expand_rows(bits, base, kv_len, bounds, full, blocks, BLOCK, batch)
    longs = [table(rows, offset=offset, dtype=torch.int64) for _ in range(2)]
    triton_order_rows(count, longs[1], rows, batch)
    triton_cut_rows(count, full, longs[1], rows, batch)
    columns, here = (table(chunks, HEADS, blocks, dtype=dtype) for dtype in (torch.int64, torch.bool))
    triton_pack_rows(table(rows, blocks, offset=offset, dtype=torch.bool), *longs, columns, here, here)


def predict(rows: int, blocks: int, offset: int) -> None:
    tokens = table(1 + rows % 2, 64 * blocks, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2)
    order, first = (table(n, offset=offset, dtype=torch.int64) for n in (64 * blocks, blocks + 1))
    sums, into = sum_tokens_triton(tokens, order, first), table(blocks, offset=offset, dtype=torch.int64)
    pool_rows_triton(sum_tokens_triton(tokens, order, first, sums, into), first[1:])
    pooled_scores_triton(table(HEADS, rows + blocks, WIDTH + 1, dtype=torch.float32), rows, 0.1, 0.5)
    chance, dense = table(HEADS, rows, 1182, dtype=torch.float64), table(HEADS, rows + 1182, dtype=torch.bool)
    select_blocks_triton(chance, dense, 0.9, 0)
    select_blocks_triton(chance, dense, None, blocks)


def exchange(rows: int, blocks: int, offset: int) -> None:
    local = table(1 + rows % 2, 64 * blocks, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2)
    sent = table(1 + rows % 2, 1, 64 * rows, WIDTH, dtype=torch.bfloat16)
    words = table(64 * rows, 1 + rows % 2, row_words(WIDTH)).transpose(0, 1)[:, None]
    less = table(1 + rows % 2, HEADS, WIDTH, dtype=torch.float32)
    buffer = table(64 * rows, 1 + rows % 2, WIDTH, dtype=torch.bfloat16)
    packed_q = table(1 + rows % 2, 1, 64 * rows, WIDTH, dtype=torch.bfloat16)
    packed_kv = table(2, 1 + rows % 2, 64 * blocks, WIDTH, dtype=torch.bfloat16).transpose(0, 1)
    tables = table(rows, 6, offset=offset), table(blocks, 6, offset=offset), table(0 if rows == 7 else 48, 6)
    for mean in MEANS:
        of_q, of_k, of_v = segments = [CopySegments(one, mean) for one in tables]
        triton_copy_segments([local], sent, [of_q])
        triton_copy_segments([local], buffer, [of_q], add=True)
        triton_copy_segments([local] * 3, buffer, segments)
        triton_copy_segments([buffer], local, [of_q])
        triton_copy_to_both(buffer, [packed_q, packed_kv], [of_q, of_k])
        triton_copy_to_both(buffer, [packed_q, packed_kv], [of_q, of_v])
        triton_quantise_segments(local, words, tables[0], mean, less, True)
        triton_quantise_segments(local, words, tables[0], mean, None, True)
        triton_quantise_segments(sent, words, tables[0], mean, None, False)
        triton_rotate_segments(buffer, local, of_q)
        triton_rotate_segments(table(64 * rows, 1 + rows % 2, row_words(WIDTH)), local, of_q)


def main() -> None:
    variants: dict[str, set[str]] = defaultdict(set)
    elsewhere: set[str] = set()
    with recorded(90) as found:
        for rows, blocks, offset in itertools.product(SIZES, SIZES, (0, 3)):
            for part in (attend, make_tables, predict, exchange):
                part(rows, blocks, offset)
    for launch in found:
        variants[launch.kernel].add(launch.variant)
        elsewhere |= set() if launch.on_device else {launch.kernel}
    print(json.dumps({"variants": {k: len(v) for k, v in variants.items()}, "elsewhere": sorted(elsewhere)}))


if __name__ == "__main__":
    main()
