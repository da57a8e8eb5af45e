"""The CPU kernel (torch's flash attention on batches of rows of equal length) and the reference in plain torch.

Performance: torch's operator processes 32 queries at a time for sequences under 192 queries, and each row is one
sequence. At 64×64 and D 64 this gives about 0.7 of its rate on long sequences, 0.5 with gathering blocks. Adjacent
rows with equal blocks, as in a dense head, form one sequence whose blocks are gathered once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, lse_dtype

GATHER_BYTES = 2 << 20
"""Bytes of keys that a thread gathers at a time, into reused memory (fresh memory costs page faults)."""
LONG = 192  # shortest sequence, in queries, that the operator processes 64 or more queries at a time


def why_unavailable() -> str | None:
    """Returns why this kernel is unavailable, or None. Its operator is private to torch and may be missing."""
    if hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return None
    return "this torch has no flash attention for CPU; torch 2.6 to 2.13 have it"


def cpu_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`."""
    q, k, v = (t.detach().contiguous() for t in (inputs.q, inputs.k, inputs.v))  # the operator needs stride 1 in D
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=lse_dtype(q.dtype), device=q.device)
    kv_len, short = inputs.kv_len, bool((inputs.kv_len < k.shape[1]).any())
    gathered = k.new_empty(2, 0, *k.shape[1:])
    for rows, blocks in _batches(inputs):
        if gathered.shape[1] < blocks.numel():
            gathered = k.new_empty(2, blocks.numel(), *k.shape[1:])
        keys, values = gathered[:, : blocks.numel()]
        torch.index_select(k, 0, blocks.flatten(), out=keys)
        torch.index_select(v, 0, blocks.flatten(), out=values)
        bias = _tail_bias(kv_len[blocks], k.shape[1], q.dtype) if short else None
        queries, of_blocks = q[rows].flatten(1, 2)[:, None], (len(rows), 1, -1, k.shape[2])  # [s, 1, r·Bq, D]
        attended = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys.view(of_blocks), values.view(of_blocks), 0.0, False, attn_mask=bias, scale=inputs.scale
        )
        out[rows], lse[rows] = attended[0].view(*rows.shape, *q.shape[1:]), attended[1].view(*rows.shape, -1)
    return out, lse


def _batches(inputs: KernelInputs) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields rows int64[s, r] and blocks int64[s, count] of s sequences, skipping rows without blocks.

    The r rows of a sequence attend to the same blocks; r > 1 only if sequences have `LONG` queries on average.
    """
    k, counts = inputs.k, inputs.kv_count
    together = GATHER_BYTES * torch.get_num_threads() // max(1, k[:1].numel() * k.element_size())
    for count in counts.unique().tolist():
        if count == 0:  # the operator would return lse 0 instead of −inf
            continue
        rows = (counts == count).nonzero().squeeze(1)
        blocks = inputs.kv_index[rows, :count]
        starts = (blocks[1:] != blocks[:-1]).any(dim=1).nonzero().squeeze(1) + 1
        if len(rows) * inputs.q.shape[1] >= LONG * (len(starts) + 1):
            for sequence in rows.tensor_split(starts):
                yield sequence[None], inputs.kv_index[sequence[:1], :count].long()
        else:
            for some in rows.split(max(1, together // count)):
                yield some[:, None], inputs.kv_index[some, :count].long()


def _tail_bias(lengths: torch.Tensor, block: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns [R, 1, 1, n·block], −inf at tokens beyond each block's length int[R, n]."""
    beyond = torch.arange(block, device=lengths.device) >= lengths[..., None]
    bias = torch.zeros(beyond.shape, dtype=dtype, device=beyond.device)
    return bias.masked_fill_(beyond, -torch.inf).flatten(1)[:, None, None]


def cpu_attention_backward(inputs: BackwardInputs) -> Gradients:
    """Computes `dbsp_kernels.block_attention_backward` in float32 or wider.

    Given the whole attention's log-sum-exp, torch's operator returns this call's share of the gradients.
    """
    forward, wide = inputs.forward, inputs.lse.dtype
    q, k, v, dout, out = (t.to(wide).contiguous() for t in (forward.q, forward.k, forward.v, inputs.dout, inputs.out))
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    short = bool((forward.kv_len < k.shape[1]).any())
    for rows, blocks in _batches(forward):
        keys, values = (t[blocks].flatten(1, 2)[:, None] for t in (k, v))
        bias = _tail_bias(forward.kv_len[blocks], k.shape[1], wide) if short else None
        queries = (t[rows].flatten(1, 2)[:, None] for t in (dout, q))
        of_all = (t[rows].flatten(1, 2)[:, None] for t in (out, inputs.lse))
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *queries, keys, values, *of_all, 0.0, False, attn_mask=bias, scale=forward.scale
        )
        dq[rows] = parts[0].view(*rows.shape, *q.shape[1:])
        for total, part in zip((dk, dv), parts[1:], strict=True):
            total.index_add_(0, blocks.flatten(), part[:, 0].unflatten(1, (blocks.shape[1], -1)).flatten(0, 1))
    return dq, dk, dv


def reference_attention(inputs: KernelInputs) -> PartialAttention:
    """Computes `dbsp_kernels.block_attention`, one row at a time, in fp32 (fp64 for fp64 input)."""
    q, k, v, kv_len = inputs.q, inputs.k, inputs.v, inputs.kv_len
    out = torch.zeros_like(q)
    wide = lse_dtype(q.dtype)
    lse = torch.full(q.shape[:2], -torch.inf, device=q.device, dtype=wide)
    for row, count in enumerate(inputs.kv_count.tolist()):
        if count == 0:
            continue
        blocks = inputs.kv_index[row, :count].long()
        lengths = list(zip(blocks.tolist(), kv_len[blocks].tolist(), strict=True))
        keys, values = (torch.cat([side[block, :n] for block, n in lengths]).to(wide) for side in (k, v))
        scores = q[row].to(wide) @ keys.T * inputs.scale
        lse[row] = torch.logsumexp(scores, dim=-1)
        out[row] = torch.softmax(scores, dim=-1) @ values
    return out, lse


def reference_attention_backward(inputs: BackwardInputs) -> Gradients:
    """Computes `dbsp_kernels.block_attention_backward` by autograd through a recomputed forward.

    The whole attention is Σ wᵢ·outᵢ with wᵢ = exp(lseᵢ − lse), so the gradients of this call's outᵢ and lseᵢ are
    wᵢ·dout and wᵢ·Σ dout·(outᵢ − out).
    """
    forward, wide = inputs.forward, inputs.lse.dtype
    leaves = [t.detach().requires_grad_(True) for t in (forward.q, forward.k, forward.v)]
    with torch.enable_grad():
        out, lse = reference_attention(replace(forward, q=leaves[0], k=leaves[1], v=leaves[2]))
    if not out.requires_grad:  # no row has a block
        return tuple(torch.zeros_like(t, dtype=wide) for t in leaves)  # type: ignore[return-value]
    dout, part = inputs.dout.to(wide), out.detach().to(wide)
    weight = torch.exp(lse.detach() - inputs.lse.masked_fill(torch.isneginf(inputs.lse), torch.inf))
    dlse = weight * (dout * part).sum(-1) - weight * inputs.delta()
    grads = torch.autograd.grad((out, lse), leaves, ((weight[..., None] * dout).to(out.dtype), dlse.to(lse.dtype)))
    return tuple(grad.to(wide) for grad in grads)  # type: ignore[return-value]
