"""The one entry point to all kernels, with its checks."""

from __future__ import annotations

import os

import torch

from dbsp_kernels.merge import PartialAttention, lse_dtype, merge_into
from dbsp_kernels.registry import KernelRequirements, choose_kernel
from dbsp_kernels.sparge import DenseHeadLayout

__all__ = ["block_attention"]


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    scale: float | None = None,
    kernel: str = "auto",
    kv_full: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    running: PartialAttention | None = None,
    out_dtype: torch.dtype | None = None,
    whole: DenseHeadLayout | None = None,
    lse: bool = True,
) -> PartialAttention:
    """Attention of packed query rows over packed KV blocks. Heads are gone: a row is a row.

    q:         [Rq, Bq, D], one query block per row
    k, v:      [Ck, Bk, D], KV blocks, wherever they landed
    kv_index:  int32[Rq, max], the blocks each row attends to: the first kv_count of its entries
    kv_count:  int32[Rq]
    kv_len:    int32[Ck], real tokens of each KV block, 1..Bk; those beyond are masked
    scale:     of the scores, default D^−1/2
    kv_full:   int32[Rq] or None: so many first entries of each row are blocks of Bk tokens (masks cost time)
    order:     int32[Rq] or None: a permutation, the order in which rows start (default: those of many blocks first)
    running:   a result over other keys, contiguous, to merge this one into: its lse is overwritten, and its out too
               unless out_dtype asks for another dtype
    out_dtype: of out; default that of running, or q's
    whole:     says that the rows are those of whole heads, for kernels that serve nothing else
    lse:       whether the caller uses it: False admits kernels that return none (NaN instead)
    returns:   out [Rq, Bq, D], lse [Rq, Bq] of `lse_dtype` (natural log); a row without blocks has out 0, lse −inf
    Raises ValueError for mismatched shapes, dtypes or devices, or a kernel that cannot serve; on CPU, and with
    DBSP_DEBUG=1 everywhere (it costs a synchronisation), for a count above the table's width, an index outside the
    packed blocks, or hints that are not true.
    """
    tables = {"kv_index": kv_index, "kv_count": kv_count, "kv_len": kv_len, "kv_full": kv_full, "order": order}
    _check(q, k, v, {name: table for name, table in tables.items() if table is not None})
    if running is not None:
        _check_running(q, running)
    needs = KernelRequirements(
        (q.shape[1], k.shape[1]), q.shape[2], lse or running is not None, ragged_rows=whole is None
    )
    chosen = choose_kernel(kernel, q.device.type, q.dtype, needs)
    options = {"kv_full": kv_full, "order": order, "running": running, "out_dtype": out_dtype, "whole": whole}
    taken = {name: value for name, value in options.items() if name in chosen.takes}
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    result = chosen.run(q, k, v, kv_index, kv_count, kv_len, scale, **taken)
    return result if "running" in chosen.takes else _merged(result, running, out_dtype)


def _merged(
    part: PartialAttention, running: PartialAttention | None, out_dtype: torch.dtype | None
) -> PartialAttention:
    """What kernels that do not merge leave to do."""
    out, lse = part
    if running is not None:
        merge_into(*running, out, lse)
        out, lse = running
    return out if out_dtype is None else out.to(out_dtype), lse


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: dict[str, torch.Tensor]) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"expected q [rows, block_q, D] and k, v [blocks, block_k, D], got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    index = tables["kv_index"]
    expected = dict.fromkeys(tables, q.shape[:1]) | {"kv_len": k.shape[:1]}
    if (
        index.ndim != 2
        or len(index) != len(q)
        or any(t.shape != expected[n] for n, t in tables.items() if t.ndim != 2)
    ):
        shapes = ", ".join(f"{name} {tuple(table.shape)}" for name, table in tables.items())
        hints = "".join(f", {name} [{len(q)}]" for name in ("kv_full", "order") if name in tables)
        raise ValueError(
            f"expected kv_index [{len(q)}, max], kv_count [{len(q)}], kv_len [{len(k)}]{hints}, got {shapes}"
        )
    if any(table.dtype != torch.int32 for table in tables.values()):
        raise ValueError(f"{', '.join(tables)} must be int32")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    devices = {str(t.device) for t in (q, k, v, *tables.values())}
    if len(devices) > 1:
        raise ValueError(f"q, k, v and the tables must be on one device, got {', '.join(sorted(devices))}")
    if q.device.type == "cpu" or os.environ.get("DBSP_DEBUG") == "1":
        _check_ranges(**tables, block=k.shape[1])


def _check_running(q: torch.Tensor, running: PartialAttention) -> None:
    out, lse = running
    fits = (out.shape, lse.shape) == (q.shape, q.shape[:2]) and out.device == lse.device == q.device
    if not fits or lse.dtype != lse_dtype(q.dtype) or not (out.is_contiguous() and lse.is_contiguous()):
        raise ValueError(
            f"running must be a contiguous out {tuple(q.shape)} and a {lse_dtype(q.dtype)} lse {tuple(q.shape[:2])} "
            f"on {q.device}, got {tuple(out.shape)} and {lse.dtype} {tuple(lse.shape)} on {out.device}"
        )


def _check_ranges(
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    block: int,
    kv_full: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
) -> None:
    rows, width = kv_index.shape
    blocks = len(kv_len)
    if rows and not 0 <= int(kv_count.min()) <= int(kv_count.max()) <= width:
        raise ValueError(f"kv_count must lie between 0 and the table's width {width}")
    if blocks and not 1 <= int(kv_len.min()) <= int(kv_len.max()) <= block:
        raise ValueError(f"kv_len must lie between 1 and block_k = {block}")
    column = torch.arange(width, device=kv_index.device)
    used = kv_index[column < kv_count[:, None]]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < blocks:
        raise ValueError(f"kv_index must lie between 0 and {blocks - 1}, the last packed KV block")
    if kv_full is not None:
        full = kv_index[column < kv_full[:, None]]
        if bool((kv_full > kv_count).any()) or bool((kv_len[full.long()] < block).any()):
            raise ValueError(f"the first kv_full entries of each row must be blocks of all {block} tokens")
    if order is not None and not torch.equal(order.long().sort().values, torch.arange(rows, device=order.device)):
        raise ValueError(f"order must name each of the {rows} rows once")
