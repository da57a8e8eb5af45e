"""The CPU kernel: torch's own flash attention, on rows of equal length together.

What bounds it: the operator works on 32 queries at a time where a sequence has fewer than 192, and a row is a
sequence. At 64×64 and D 64 that is about 0.7 of its rate on long sequences; gathering blocks takes it to about 0.5.
"""

from __future__ import annotations

import itertools

import torch

from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, lse_dtype

__all__ = ["cpu_attention", "cpu_attention_backward", "why_unavailable"]

GATHER_BYTES = 2 << 20
"""Bytes of keys that a thread gathers at a time, into memory that is reused: fresh memory costs page faults."""

STRETCH_BYTES = 256 << 20
"""Bytes of keys that neighbouring rows gather in a stretch: they share a head's keys, which stay in the cache."""


def why_unavailable() -> str | None:
    """Why this kernel cannot work here, or None. The operator is private to torch, so its absence is not an error."""
    if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return None
    return "this torch has no flash attention for CPU; torch 2.6 to 2.13 have it"


def cpu_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`."""
    kv_count, kv_len = inputs.kv_count, inputs.kv_len
    q, k, v = (t.detach().contiguous() for t in (inputs.q, inputs.k, inputs.v))  # the operator needs a D of stride 1
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
    short = bool((kv_len < k.shape[1]).any())
    block_bytes = _block_bytes(k)
    together = GATHER_BYTES * torch.get_num_threads() // block_bytes
    gathered = k.new_empty(2, max(min(together, int(kv_count.sum())), inputs.kv_index.shape[1]), *k.shape[1:])
    for rows in _stretches(kv_count, block_bytes):
        counts = kv_count[rows.start : rows.stop]
        for count in counts.unique().tolist():
            if count == 0:  # the operator would give lse 0, not −inf
                continue
            alike = (counts == count).nonzero().squeeze(1) + rows.start
            for chunk in alike.split(max(1, together // count)):
                blocks = inputs.kv_index[chunk, :count].long()
                keys, values = gathered[:, : blocks.numel()]
                torch.index_select(k, 0, blocks.flatten(), out=keys)
                torch.index_select(v, 0, blocks.flatten(), out=values)
                bias = _tail_bias(kv_len[blocks], k.shape[1], q.dtype) if short else None
                shape = (len(chunk), -1, k.shape[2])
                out[chunk], lse[chunk] = _flash(q[chunk], keys.view(shape), values.view(shape), bias, inputs.scale)
    return out, lse


def _block_bytes(k: torch.Tensor) -> int:
    return k[0].numel() * k.element_size() if len(k) else 1


def _stretches(kv_count: torch.Tensor, block_bytes: int) -> list[range]:
    """Runs of neighbouring rows whose blocks take at most STRETCH_BYTES, or of a single row."""
    before = (kv_count.long().cumsum(0) - kv_count) * block_bytes // STRETCH_BYTES
    lengths = before.unique_consecutive(return_counts=True)[1].tolist()
    ends = list(itertools.accumulate(lengths))
    return [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> PartialAttention:
    """(out [R, Bq, D], lse [R, Bq]) of q [R, Bq, D] over k and v [R, m, D], with bias [R, 1, 1, m] or None."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], k[:, None], v[:, None], 0.0, False, attn_mask=bias, scale=scale
    )
    return out[:, 0], lse[:, 0]


def _tail_bias(lengths: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """[R, 1, 1, n·block]: −inf on the tokens beyond each block's length, given int[R, n]."""
    beyond = torch.arange(block, device=lengths.device) >= lengths[..., None]
    bias = torch.zeros(beyond.shape, dtype=dtype, device=beyond.device)
    return bias.masked_fill_(beyond, -torch.inf).flatten(1)[:, None, None]


def cpu_attention_backward(inputs: BackwardInputs) -> Gradients:
    """The contract of `dbsp_kernels.block_attention_backward`, in float32 at least.

    torch's operator accepts any log-sum-exp: with the whole attention's it returns this call's part of the gradients.
    """
    given, wide = inputs.forward, inputs.lse.dtype
    q, k, v, dout, out = (t.to(wide).contiguous() for t in (given.q, given.k, given.v, inputs.dout, inputs.out))
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    short = bool((given.kv_len < k.shape[1]).any())
    together = GATHER_BYTES * torch.get_num_threads() // _block_bytes(k)
    for count in given.kv_count.unique().tolist():
        if count == 0:
            continue
        alike = (given.kv_count == count).nonzero().squeeze(1)
        for rows in alike.split(max(1, together // count)):
            blocks = given.kv_index[rows, :count].long()
            keys, values = (t[blocks].flatten(1, 2)[:, None] for t in (k, v))
            bias = _tail_bias(given.kv_len[blocks], k.shape[1], wide) if short else None
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[rows, None], q[rows, None], keys, values, out[rows, None], inputs.lse[rows, None],
                0.0, False, attn_mask=bias, scale=given.scale,
            )  # fmt: skip
            dq[rows] = parts[0][:, 0]
            for total, part in zip((dk, dv), parts[1:], strict=True):
                total.index_add_(0, blocks.flatten(), part[:, 0].unflatten(1, (count, -1)).flatten(0, 1))
    return dq, dk, dv
