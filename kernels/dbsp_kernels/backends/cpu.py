"""The CPU kernel: rows of equal length are gathered and given to torch's own flash attention together."""

from __future__ import annotations

import itertools

import torch

from dbsp_kernels.inputs import KernelInputs
from dbsp_kernels.merge import PartialAttention, lse_dtype

__all__ = ["GATHER_BYTES", "cpu_attention", "tail_bias", "why_unavailable"]

GATHER_BYTES = 2 << 20
"""Of keys gathered at a time for each thread, into memory that is reused: fresh memory costs page faults."""

STRETCH_BYTES = 256 << 20
"""Of keys that neighbouring rows gather in one stretch: they share a head's keys, which then stay in the cache."""


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None. The operator is private to torch, so its absence is not an error."""
    if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return None
    return "this torch has no flash attention for CPU; torch 2.6 to 2.13 have it"


def cpu_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`."""
    kv_count, kv_len = inputs.kv_count, inputs.kv_len
    q, k, v = (t.contiguous() for t in (inputs.q, inputs.k, inputs.v))  # the operator reads D as if its stride were 1
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype))
    short = bool((kv_len < k.shape[1]).any())
    gather = _Gather(k, v)
    together = GATHER_BYTES * torch.get_num_threads()
    for rows in _stretches(kv_count, gather.block_bytes):
        counts = kv_count[rows.start : rows.stop]
        for count in counts.unique().tolist():
            if count == 0:  # the operator would give lse 0, not −inf
                continue
            alike = (counts == count).nonzero().squeeze(1) + rows.start
            for chunk in alike.split(max(1, together // (count * gather.block_bytes))):
                blocks = inputs.kv_index[chunk, :count].long()
                bias = tail_bias(kv_len[blocks], k.shape[1], q.dtype) if short else None
                out[chunk], lse[chunk] = _flash(q[chunk], *gather(blocks), bias, inputs.scale)
    return out, lse


def _stretches(kv_count: torch.Tensor, block_bytes: int) -> list[range]:
    """Runs of rows side by side whose blocks are of STRETCH_BYTES or less, or of a single row."""
    before = (kv_count.long().cumsum(0) - kv_count) * block_bytes // STRETCH_BYTES
    lengths = before.unique_consecutive(return_counts=True)[1].tolist()
    ends = list(itertools.accumulate(lengths))
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


class _Gather:
    """Takes blocks of keys and values together, into memory of its own that the next ones overwrite."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.block_bytes = k[0].numel() * k.element_size() if len(k) else 1
        self._k, self._v = k.detach(), v.detach()
        self._memory = k.new_empty(2, 0, *k.shape[1:])

    def __call__(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """blocks: int64[R, n]; returns: keys and values, [R, n, Bk, D]"""
        if self._memory.shape[1] < blocks.numel():
            self._memory = self._k.new_empty(2, blocks.numel(), *self._k.shape[1:])
        keys, values = self._memory[:, : blocks.numel()]
        torch.index_select(self._k, 0, blocks.flatten(), out=keys)
        torch.index_select(self._v, 0, blocks.flatten(), out=values)
        return keys.unflatten(0, blocks.shape), values.unflatten(0, blocks.shape)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> PartialAttention:
    """q: [R, Bq, D]; k, v: [R, n, Bk, D]; bias: [R, 1, 1, n·Bk] or None. returns: out [R, Bq, D], lse [R, Bq]."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], k.flatten(1, 2)[:, None], v.flatten(1, 2)[:, None], 0.0, False, attn_mask=bias, scale=scale
    )
    return out[:, 0], lse[:, 0]


def tail_bias(lengths: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """−inf on the tokens beyond each block's length. lengths: int[R, n]; returns: [R, 1, 1, n·block]."""
    beyond = torch.arange(block) >= lengths[..., None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf).flatten(1)[:, None, None]
