"""The CPU kernel: torch's own flash attention, on rows of equal length together, or on rows of the same blocks as one.

What bounds it: the operator works on 32 queries at a time where a sequence has fewer than 192; a row is a sequence.
At 64×64 and D 64 that is about 0.7 of its rate on long sequences, and gathering blocks takes it to about 0.5.
Rows of the same blocks, as a dense head's, make one sequence, not gathered.
"""

from __future__ import annotations

import itertools

import torch

from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, lse_dtype

__all__ = ["cpu_attention", "cpu_attention_backward", "why_unavailable"]

GATHER_BYTES = 2 << 20
"""Bytes of keys that a thread gathers at a time, into memory that is reused: fresh memory costs page faults."""

LONG = 192
"""Queries from which on torch's flash attention works on 64 or more of them at a time, and not on 32."""

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
    q, k, v = (t.contiguous() for t in (inputs.q, inputs.k, inputs.v))  # the operator reads D as if its stride were 1
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
    short = bool((kv_len < k.shape[1]).any())
    gather = _Gather(k, v)
    together = GATHER_BYTES * torch.get_num_threads()
    # 1. Rows that share their blocks, as one sequence.
    rest = kv_count.clone()
    for rows, run in _long_sequences(inputs.kv_index, kv_count, q.shape[1]):
        of_rows, of_blocks = slice(rows.start, rows.stop), slice(run.start, run.stop)
        bias = _tail_bias(kv_len[of_blocks][None], k.shape[1], q.dtype) if short else None
        one = _flash(q[of_rows].flatten(0, 1)[None], k[of_blocks][None], v[of_blocks][None], bias, inputs.scale)
        out[of_rows], lse[of_rows] = one[0].view_as(out[of_rows]), one[1].view_as(lse[of_rows])
        rest[of_rows] = 0
    # 2. The other rows, those with equally many blocks together.
    for rows in _stretches(rest, gather.block_bytes):
        counts = rest[rows.start : rows.stop]
        for count in counts.unique().tolist():
            if count == 0:  # the operator would give lse 0, not −inf
                continue
            alike = (counts == count).nonzero().squeeze(1) + rows.start
            for chunk in alike.split(max(1, together // (count * gather.block_bytes))):
                blocks = inputs.kv_index[chunk, :count].long()
                bias = _tail_bias(kv_len[blocks], k.shape[1], q.dtype) if short else None
                out[chunk], lse[chunk] = _flash(q[chunk], *gather(blocks), bias, inputs.scale)
    return out, lse


def _long_sequences(kv_index: torch.Tensor, kv_count: torch.Tensor, block_q: int) -> list[tuple[range, range]]:
    """(rows, blocks): neighbouring rows, LONG queries or more, that all attend to the same run of blocks."""
    column = torch.arange(kv_index.shape[1], device=kv_index.device)
    unused = column >= kv_count[:, None]
    first = kv_index.masked_fill(unused, 1 << 30).amin(1) if len(column) else kv_count
    # 1. Groups of neighbours with the same first block and number of blocks, which may be runs of blocks.
    alike = torch.stack([first, kv_count], dim=1).unique_consecutive(dim=0, return_counts=True)
    found, start = [], 0
    for (block, count), rows in zip(alike[0].tolist(), alike[1].tolist(), strict=True):
        group, start = range(start, start + rows), start + rows
        if count == 0 or rows * block_q < LONG:
            continue
        # 2. Whether each row's list, in any order, is that run.
        lists = kv_index[group.start : group.stop, :count].sort(dim=1).values
        if bool((lists == block + column[:count]).all()):
            found.append((group, range(block, block + count)))
    return found


def _stretches(kv_count: torch.Tensor, block_bytes: int) -> list[range]:
    """Runs of neighbouring rows whose blocks take at most STRETCH_BYTES, or of a single row."""
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
        """Keys and values [R, n, Bk, D] of blocks int64[R, n]."""
        if self._memory.shape[1] < blocks.numel():
            self._memory = self._k.new_empty(2, blocks.numel(), *self._k.shape[1:])
        keys, values = self._memory[:, : blocks.numel()]
        torch.index_select(self._k, 0, blocks.flatten(), out=keys)
        torch.index_select(self._v, 0, blocks.flatten(), out=values)
        return keys.unflatten(0, blocks.shape), values.unflatten(0, blocks.shape)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, scale: float
) -> PartialAttention:
    """(out [R, Bq, D], lse [R, Bq]) of q [R, Bq, D] over k and v [R, n, Bk, D], with bias [R, 1, 1, n·Bk] or None."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, None], k.flatten(1, 2)[:, None], v.flatten(1, 2)[:, None], 0.0, False, attn_mask=bias, scale=scale
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
    block_bytes = k[0].numel() * k.element_size() if len(k) else 1
    for count in given.kv_count.unique().tolist():
        if count == 0:
            continue
        alike = (given.kv_count == count).nonzero().squeeze(1)
        for rows in alike.split(max(1, GATHER_BYTES * torch.get_num_threads() // (count * block_bytes))):
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
