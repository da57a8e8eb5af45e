"""Tile shapes of the Triton kernel: fixed, so that all ranks and runs on one kind of GPU have equal results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dbsp_kernels.triton.launch import capability_of, triton_version

HOPPER = 90


@dataclass(frozen=True)
class Tiles:
    """Tile sizes and schedule of one program."""

    queries: int  # of a row, per program
    keys: int  # per step of its loop; a larger block takes several steps, the last of which may be partial
    warps: int
    stages: int  # tiles of keys and values in flight
    loop: Literal["plain", "late", "scale_first", "halves"] = "plain"
    """Schedule of full blocks in forward. "plain": products and softmax alternate; "late": weights meet their values
    one step late; "scale_first": "late", but the output is scaled before the step's first product; "halves": the
    output as two tiles of half of D."""


def padded(size: int) -> int:
    """Returns the next power of two that matrix units support (at least 16), as Triton tiles require."""
    return max(16, 1 << (size - 1).bit_length())


@functools.lru_cache(maxsize=64)  # called at every launch
def tiles_for(block_q: int, block_k: int, head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Returns tiles for blocks of block_q × block_k and heads of `head_dim` on a GPU of this capability (Hopper: 90).

    Limits: shared memory for (queries + 2 · stages · keys) · head_dim elements (227 KB per multiprocessor on Hopper,
    99 KB on the smallest GPUs since sm80) and registers for queries · (keys + head_dim) fp32 values.
    """
    block_q, block_k, head_dim = padded(block_q), padded(block_k), padded(head_dim)
    if dtype == torch.float32:
        return Tiles(min(block_q, 64), min(block_k, 16), warps=4, stages=3 if head_dim <= 128 else 1)
    if head_dim > 128:
        return Tiles(min(block_q, 64), min(block_k, 32), warps=4, stages=3 if head_dim <= 256 else 1)
    if capability // 10 in (8, 12):
        return _tiles_of_warps(block_q, block_k, head_dim, capability)
    queries = 128 if block_q >= 128 else block_q
    if capability == HOPPER and head_dim == 128 and block_k <= 64:
        queries = min(queries, 64)  # 1.17× as fast as one program of 128 on an H200
    loop = _loop(queries, head_dim, capability)
    if queries < 128:
        # Two programs per multiprocessor, 113 KB each at D 128: softmax of one overlaps products of the other.
        return Tiles(queries, min(block_k, 64), warps=4, stages=5, loop=loop)
    return Tiles(128, min(block_k, 128), warps=8, stages=5, loop=loop)


def _loop(queries: int, head_dim: int, capability: int) -> Literal["plain", "late", "scale_first"]:
    """Returns the fastest loop where warpgroups multiply: "late", except on Hopper with Triton 3.6.

    There, products of "late" are serialized (ptxas C7515). On an H200 "plain" was fastest for 128 queries;
    "scale_first" for 64 from density 0.7 on, and within 2 % below (docs/kernels.md). Triton 3.7 to 3.9 lose overlap
    with "scale_first"; they were not timed.
    """
    if capability != HOPPER or head_dim != 128 or triton_version() != (3, 6):
        return "late"
    return "plain" if queries == 128 else "scale_first"


def _tiles_of_warps(block_q: int, block_k: int, head_dim: int, capability: int) -> Tiles:
    """Returns tiles where each warp multiplies alone (sm80 to 89, 120, 121), with 99 KB of shared memory beyond sm80.

    Four warps, two programs per multiprocessor. Few keys per step leave registers for a wide output; more rows per
    warp reduce reads from shared memory.
    """
    if head_dim > 64:
        rows = 64 if capability >= 120 else 128
        return Tiles(min(block_q, rows), min(block_k, 32), warps=4, stages=3, loop="halves")
    if capability == 80 and block_q >= 128:
        return Tiles(128, min(block_k, 64), warps=4, stages=3)
    return Tiles(min(block_q, 64), min(block_k, 32), warps=4, stages=3)


def int8_tiles_for(block_q: int, block_k: int, head_dim: int, dtype: torch.dtype, capability: int) -> Tiles:
    """Returns tiles for int8 queries and keys: smaller, since scores take registers as integers and as fp32."""
    if capability // 10 == 8:
        block_q = min(block_q, 64)
    return tiles_for(block_q, min(block_k, 64), head_dim, dtype, capability)


ChooseTiles = Callable[[int, int, int, torch.dtype, int], Tiles]


def row_slots(q: torch.Tensor, blocks: tuple[int, int], choose: ChooseTiles = tiles_for) -> int | None:
    """Returns how many rows of blocks (block_q, block_k) q's GPU computes at a time, or None off GPUs."""
    return _slots_on(q.device, blocks, q.shape[-1], q.dtype, choose) if q.is_cuda else None


@functools.lru_cache(maxsize=64)  # called in every attention
def _slots_on(
    device: torch.device, blocks: tuple[int, int], head_dim: int, dtype: torch.dtype, choose: ChooseTiles
) -> int:
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return slots_of(multiprocessors, capability_of(device), blocks, head_dim, dtype, choose)


def slots_of(
    multiprocessors: int,
    capability: int,
    blocks: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    choose: ChooseTiles = tiles_for,
) -> int:
    """Returns `row_slots` of a GPU: multiprocessors × programs on each (two of four warps fit) / programs of a row."""
    tiles = choose(*blocks, head_dim, dtype, capability)
    programs = multiprocessors * (2 if tiles.warps == 4 else 1)
    return max(1, programs // -(-blocks[0] // tiles.queries))


def backward_tiles_for(block_q: int, block_k: int, head_dim: int, dtype: torch.dtype) -> tuple[Tiles, Tiles]:
    """Returns backward tiles of dQ and of dK and dV, for blocks of block_q × block_k and heads of `head_dim`.

    Registers are the limit: dK and dV of 64 keys at D 128 take 234 of a thread's 255 with four warps. At D 64 products
    are serialized with four warps (ptxas C7515) but not with eight.
    """
    if dtype == torch.float32 or padded(head_dim) > 128:
        rows, keys = Tiles(32, 16, warps=4, stages=3), Tiles(16, 32, warps=4, stages=3)
    else:
        rows = Tiles(64, 32, warps=4, stages=5)
        keys = Tiles(32, 64, warps=4, stages=5) if padded(head_dim) == 128 else Tiles(32, 128, warps=8, stages=5)
    most_q, most_k = padded(block_q), padded(block_k)
    rows, keys = (
        replace(tiles, queries=min(tiles.queries, most_q), keys=min(tiles.keys, most_k)) for tiles in (rows, keys)
    )
    return rows, keys
