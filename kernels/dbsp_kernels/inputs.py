"""What every kernel is given: one attention of packed query rows over packed KV blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dbsp_kernels.merge import PartialAttention, lse_dtype

__all__ = ["DenseHeadLayout", "KernelInputs"]


@dataclass(frozen=True)
class DenseHeadLayout:
    """Rows and KV blocks that are all those of some heads, in order.

    Attributes:
        heads: Number of heads.
        tokens: Tokens of each head; only its last query block and its last KV block may be short.
    """

    heads: int
    tokens: int


@dataclass(frozen=True, eq=False)
class KernelInputs:
    """The arguments of `dbsp_kernels.block_attention`, which describes them, as all kernels share them."""

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
    head_layout: DenseHeadLayout | None = None

    @property
    def blocks(self) -> tuple[int, int]:
        """(block_q, block_k)"""
        return self.q.shape[1], self.k.shape[1]

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """The tables that are given, by name."""
        names = ("kv_index", "kv_count", "kv_len", "kv_full", "row_schedule")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def positively_scaled(self) -> tuple[torch.Tensor, float]:
        """q and a scale above 0 that give the same scores, for kernels that take maxima before they scale."""
        if self.scale > 0:
            return self.q, self.scale
        return (-self.q, -self.scale) if self.scale < 0 else (torch.zeros_like(self.q), 1.0)

    def merged_into(self, partial: PartialAttention) -> KernelInputs:
        """The inputs with another partial result to merge into, in its dtype."""
        return replace(self, partial=partial, out_dtype=None)

    def check(self) -> None:
        """Raises ValueError for shapes, dtypes or devices that do not go together. Reads no values."""
        q, k, v, index, tables = self.q, self.k, self.v, self.kv_index, self.tables
        if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
            raise ValueError(
                f"expected q [rows, block_q, D] and k, v [blocks, block_k, D], got q {tuple(q.shape)}, "
                f"k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
        expected = dict.fromkeys(tables, q.shape[:1]) | {
            "kv_index": (len(q), *index.shape[1:2]),
            "kv_len": k.shape[:1],
        }
        if index.ndim != 2 or any(table.shape != expected[name] for name, table in tables.items()):
            shapes = ", ".join(f"{name} {tuple(table.shape)}" for name, table in tables.items())
            hints = "".join(f", {name} [{len(q)}]" for name in ("kv_full", "row_schedule") if name in tables)
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
        if self.partial is not None:
            self._check_partial(*self.partial)

    def _check_partial(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        q, wide = self.q, lse_dtype(self.q.dtype)
        fits = (out.shape, lse.shape) == (q.shape, q.shape[:2]) and out.device == lse.device == q.device
        if not fits or lse.dtype != wide or not (out.is_contiguous() and lse.is_contiguous()):
            raise ValueError(
                f"partial must be a contiguous out {tuple(q.shape)} and a {wide} lse {tuple(q.shape[:2])} "
                f"on {q.device}, got {tuple(out.shape)} and {lse.dtype} {tuple(lse.shape)} on {out.device}"
            )

    def check_values(self) -> None:
        """Raises ValueError for counts, indices or hints that are not true. Synchronises with the device."""
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
