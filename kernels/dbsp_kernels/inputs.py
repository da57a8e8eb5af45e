"""Inputs of every kernel: one attention of packed query rows over packed KV blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dbsp_kernels.row_parts import RowParts


@dataclass(eq=False)  # not frozen: created per chunk, and freezing makes that five times slower
class KernelInputs:
    """Arguments of `dbsp_kernels.block_attention` (documented there)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_index: torch.Tensor
    kv_count: torch.Tensor
    kv_len: torch.Tensor
    scale: float
    kv_full: torch.Tensor | None = None
    row_schedule: torch.Tensor | None = None
    partial: PartialAttention | None = None
    out_dtype: torch.dtype | None = None
    head_tokens: int | None = None
    parts: RowParts | None = None

    @property
    def blocks(self) -> tuple[int, int]:
        """(block_q, block_k)"""
        return self.q.shape[1], self.k.shape[1]

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """The tables that are not None, by name."""
        names = ("kv_index", "kv_count", "kv_len", "kv_full", "row_schedule")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def positively_scaled(self) -> tuple[torch.Tensor, float]:
        """Returns q and a positive scale with equal scores, for kernels that take the maximum before scaling."""
        if self.scale > 0:
            return self.q, self.scale
        return (-self.q, -self.scale) if self.scale < 0 else (torch.zeros_like(self.q), 1.0)

    def check(self) -> None:
        """Raises ValueError for mismatched shapes, dtypes or devices, without reading values."""
        q, k, v, tables = self.q, self.k, self.v, self.tables
        if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"expected q [rows, block_q, D] and k, v [blocks, block_k, D], got q {tuple(q.shape)}, "
                f"k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        rows, blocks = q.shape[0], k.shape[0]
        expected = {"kv_index": [rows, *self.kv_index.shape[-1:]], "kv_len": [blocks]}
        for name, table in tables.items():
            shape = expected.get(name, [rows])
            if list(table.shape) != shape or table.dtype != torch.int32:
                raise ValueError(f"expected {name} int32{shape}, got {table.dtype} {list(table.shape)}")
        if not q.dtype == k.dtype == v.dtype:
            raise ValueError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        devices = {str(t.device) for t in (q, k, v, *tables.values())}
        if len(devices) > 1:
            raise ValueError(f"q, k, v and the tables must be on one device, got {', '.join(sorted(devices))}")
        if self.partial is None:
            return
        (out, lse), wide = self.partial, lse_dtype(q.dtype)
        fits = (out.shape, lse.shape) == (q.shape, q.shape[:2]) and out.device == lse.device == q.device
        if not fits or lse.dtype != wide or not (out.is_contiguous() and lse.is_contiguous()):
            raise ValueError(
                f"partial must be a contiguous out {tuple(q.shape)} and a {wide} lse {tuple(q.shape[:2])} "
                f"on {q.device}, got {tuple(out.shape)} and {lse.dtype} {tuple(lse.shape)} on {out.device}"
            )

    def check_values(self) -> None:
        """Raises ValueError for wrong counts, indices or hints. Synchronizes with the device."""
        (rows, width), blocks, block = self.kv_index.shape, len(self.kv_len), self.k.shape[1]
        if rows and not 0 <= int(self.kv_count.min()) <= int(self.kv_count.max()) <= width:
            raise ValueError(f"kv_count must lie between 0 and the table's width {width}")
        if blocks and not 1 <= int(self.kv_len.min()) <= int(self.kv_len.max()) <= block:
            raise ValueError(f"kv_len must lie between 1 and block_k = {block}")
        column = torch.arange(width, device=self.kv_index.device)
        used = self.kv_index[column < self.kv_count[:, None]]
        if len(used) and not 0 <= int(used.min()) <= int(used.max()) < blocks:
            raise ValueError(f"kv_index must lie between 0 and {blocks - 1}, the last packed KV block")
        if self.kv_full is not None:
            full = self.kv_index[column < self.kv_full[:, None]]
            if bool((self.kv_full > self.kv_count).any()) or bool((self.kv_len[full.long()] < block).any()):
                raise ValueError(f"the first kv_full entries of each row must be blocks of all {block} tokens")
        if self.row_schedule is not None:
            scheduled = self.row_schedule.long().sort().values
            if not torch.equal(scheduled, torch.arange(rows, device=scheduled.device)):
                raise ValueError(f"row_schedule must name each of the {rows} rows once")
        if self.parts is not None:
            row, _, entries, *_ = self.parts.items.long().unbind(1)
            listed = entries.new_zeros(rows + 1).index_add_(0, row + 1, entries)[1:]  # drop unused items
            if not torch.equal(listed, self.kv_count.long()):
                raise ValueError("the parts of each row must list as many blocks as kv_count")


def one_head(t: torch.Tensor) -> torch.Tensor:
    """Reshapes [n, B, D] → [1, n·B, 1, D]: all rows or blocks as one head, for third-party kernels."""
    return t.reshape(1, -1, 1, t.shape[-1]).contiguous()


PartialAttention = tuple[torch.Tensor, torch.Tensor]
"""Result over some of the keys: out [..., D] and lse [...], natural log; 0 and −inf for queries without keys."""


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the log-sum-exp for queries of `dtype`: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def merge_states(
    out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over two disjoint key sets.

    The usual update is out·σ(lse − lse_part) + out_part·σ(lse_part − lse). If both sides are −inf, their difference is
    NaN, so weights are relative to a finite maximum.

    out and out_part are [..., D]; lse and lse_part are [...], natural log, of `lse_dtype`; without keys lse is −inf
    and out 0. Returns out in out's dtype, and lse.
    """
    top = torch.maximum(lse, lse_part)
    finite_top = torch.where(torch.isneginf(top), torch.zeros_like(top), top)
    weight, weight_part = torch.exp(lse - finite_top), torch.exp(lse_part - finite_top)
    total = weight + weight_part
    share = weight / torch.where(total == 0, torch.ones_like(total), total)
    share_part = weight_part / torch.where(total == 0, torch.ones_like(total), total)
    merged = out * share[..., None] + out_part * share_part[..., None]
    return merged.to(out.dtype), finite_top + torch.log(total)


def merge_into(out: torch.Tensor, lse: torch.Tensor, out_part: torch.Tensor, lse_part: torch.Tensor) -> None:
    """Merges like `merge_states`, in place into `out` and `lse`; on CUDA in one pass over memory.

    Each item of out and lse along the first dimension must be contiguous.
    """
    contiguous_items = all(len(t) == 0 or t[0].is_contiguous() for t in (out, lse))
    if out.is_cuda and lse.dtype == torch.float32 and contiguous_items:
        from dbsp_kernels.triton.merge import triton_merge_into  # here: triton need not be installed

        triton_merge_into(out, lse, out_part.contiguous(), lse_part.contiguous())
        return
    merged, merged_lse = merge_states(out, lse, out_part, lse_part)
    out.copy_(merged)
    lse.copy_(merged_lse)


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq [Rq, Bq, D], dk and dv [Ck, Bk, D], of `lse_dtype`; zero for rows and blocks outside the attention."""
TransposedTable = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The rows int32[Ck, most] that attend to each packed block, ascending, their count int32[Ck], and the order int32[Ck]
in which blocks start (None: in order)."""


@dataclass(frozen=True, eq=False)
class BackwardInputs:
    """Inputs of a kernel's backward; out and lse are those of the attention over *all* keys, including other calls'.

    Gradients of calls over disjoint keys then add up, because each P = exp(scale·QKᵀ − lse) is a part of the whole
    softmax.
    """

    forward: KernelInputs  # q, k, v, scale and tables of the forward; `partial` and `out_dtype` are None
    dout: torch.Tensor  # [Rq, Bq, D]
    out: torch.Tensor
    lse: torch.Tensor
    transposed: Callable[[], TransposedTable]  # returns the forward's tables transposed, for kernels that need them

    def delta(self) -> torch.Tensor:
        """Returns Σ dout · out, [Rq, Bq], of lse's dtype."""
        return (self.dout.to(self.lse.dtype) * self.out.to(self.lse.dtype)).sum(dim=-1)
