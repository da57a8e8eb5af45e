"""Dense rows of a packed attention, on the fused kernel that torch chooses, with log-sum-exp."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from dbsp_kernels.attention import block_attention
from dbsp_kernels.inputs import PartialAttention
from dbsp_kernels.kernel import HALVES, Kernel

__all__ = ["DensePart", "attend_dense_part", "dense_supported", "fused_kernel", "item_table"]

aten = torch.ops.aten
_log = logging.getLogger("dbsp.kernels")
_ran: dict[tuple[torch.device, torch.dtype, int], str | None] = {}
"""Torch's fused kernel that ran last, by device, dtype and head dim; None: there is none, or it raised."""


@dataclass(frozen=True, eq=False)
class DensePart:
    """Packed rows side by side that attend to all of some packed blocks side by side.

    Attributes:
        rows, blocks: First and last, exclusive, in one copy of the batch.
        tokens: int64, the real tokens among the blocks' places; None: all of them.
    """

    rows: tuple[int, int]
    blocks: tuple[int, int]
    tokens: torch.Tensor | None


def dense_supported(q: torch.Tensor) -> bool:
    """Returns whether torch may have a fused kernel for q [..., D] on a GPU that returns a log-sum-exp."""
    width = q.shape[-1]
    fits = q.is_cuda and q.dtype in HALVES and width % 8 == 0 and width <= 256
    return fits and _ran.get(_kind(q), "") is not None


def fused_kernel(q: torch.Tensor) -> str | None:
    """Returns the name of torch's fused kernel that ran dense rows of such q on a GPU last, or None."""
    return _ran.get(_kind(q))


def attend_dense_part(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    part: DensePart,
    kv_len: torch.Tensor,
    scale: float,
    kernel: str | Kernel = "auto",
) -> PartialAttention:
    """Attention of one part, on torch's fused kernel or else on `kernel`.

    Args:
        q: [B, Rq, Bq, D].
        k, v: [B, Ck, Bk, D].
        kv_len: int32[Ck], real tokens of each block.
        kernel: The block kernel that runs the part if torch has no fused kernel for it.

    Returns:
        out [B, rows, Bq, D] in q's dtype and lse [B, rows, Bq], natural log.
    """
    rows, blocks = q[:, slice(*part.rows)], slice(*part.blocks)
    found = None
    if dense_supported(q):
        keys, values = (t[:, blocks].flatten(1, 2) for t in (k, v))
        if part.tokens is not None:
            keys, values = (t.index_select(1, part.tokens) for t in (keys, values))
        queries, keys, values = (t[:, None].contiguous() for t in (rows.flatten(1, 2), keys, values))
        found = _attend(queries, keys, values, scale)
    if found is None:
        found = _attend_by_blocks(rows, k[:, blocks], v[:, blocks], kv_len[blocks], scale, kernel)
    return found[0].reshape(rows.shape), found[1].reshape(rows.shape[:3])


def _attend_by_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_len: torch.Tensor, scale: float, kernel: str | Kernel
) -> PartialAttention:
    """Runs rows [B, r, Bq, D] on a block kernel, each over all its item's blocks [B, n, Bk, D]."""
    tables = (*item_table(len(q), q.shape[1], k.shape[1], q.device), kv_len.repeat(len(q)))
    q, k, v = (t.flatten(0, 1).contiguous() for t in (q, k, v))
    return block_attention(q, k, v, *tables, scale=scale, kernel=kernel)


def item_table(items: int, rows: int, blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns kv_index int32[items · rows, blocks] and kv_count of rows that attend to all blocks of their item."""
    every = torch.arange(items * blocks, dtype=torch.int32, device=device).view(items, blocks)
    return every.repeat_interleave(rows, 0), torch.full((items * rows,), blocks, dtype=torch.int32, device=device)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention | None:
    """Attends with q [B, H, n, D] to k and v [B, H, m, D] on torch's fused kernel; None if there is none.

    Ranks may differ in what they find here: results differ by rounding only.
    """
    try:
        name, run = _FUSED.get(torch._fused_sdp_choice(q, k, v, None, 0.0, False, scale=scale), ("", None))
        if run is not None:
            found = run(q, k, v, scale)
            _ran[_kind(q)] = name
            return found
        reason = "torch chooses no fused kernel that returns a log-sum-exp"
    except _NOT_OURS:
        raise
    except RuntimeError as error:  # an operator that this build of torch or this GPU lacks
        reason = " ".join(str(error).split())[:200]
    _ran[_kind(q)] = None
    _log.warning("dense heads run on the block kernel (%s, head dim %d): %s", q.dtype, q.shape[-1], reason)
    return None


_NOT_OURS = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""Errors that another kernel cannot avoid."""


def _kind(q: torch.Tensor) -> tuple[torch.device, torch.dtype, int]:
    return q.device, q.dtype, q.shape[-1]


def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return out, lse


def _efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, lse[..., : q.shape[2]]  # its log-sum-exp is padded


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> PartialAttention:
    """Runs cuDNN, which compiles a graph per shape, with queries padded to one of few numbers."""
    queries = q.shape[2]
    padding = _graph_queries(queries, k.shape[2]) - queries
    q = torch.nn.functional.pad(q, (0, 0, 0, padding)) if padding else q
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, False, False, scale=scale)
    return out[:, :, :queries], lse.reshape(q.shape[:3])[:, :, :queries]


def _graph_queries(queries: int, keys: int) -> int:
    """Returns the number of queries of the cuDNN graph: as many as keys, or one of 16 sizes per power of two."""
    if queries == keys:  # a whole head
        return queries
    step = max(64, 1 << max(0, queries.bit_length() - 5))
    return -(-queries // step) * step


_FUSED: dict[int, tuple[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], PartialAttention]]] = {
    SDPBackend.FLASH_ATTENTION.value: ("flash", _flash),
    SDPBackend.EFFICIENT_ATTENTION.value: ("efficient", _efficient),
    SDPBackend.CUDNN_ATTENTION.value: ("cudnn", _cudnn),
}
"""Names and operators by torch's choice."""
