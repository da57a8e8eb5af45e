"""The reference kernel: plain torch in fp32 (fp64 for fp64 input), short enough to trust by reading."""

from __future__ import annotations

from dataclasses import replace

import torch

from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, lse_dtype

__all__ = ["reference_attention", "reference_attention_backward"]


def reference_attention(inputs: KernelInputs) -> PartialAttention:
    """The contract of `dbsp_kernels.block_attention`, one row at a time."""
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
    """The contract of `dbsp_kernels.block_attention_backward`, by autograd of a forward that is computed once more.

    The whole attention is Σ wᵢ·outᵢ with wᵢ = exp(lseᵢ − lse), so that of this call's (outᵢ, lseᵢ) the gradients are
    wᵢ·dout and wᵢ·Σ dout·(outᵢ − out).
    """
    given, wide = inputs.forward, inputs.lse.dtype
    leaves = [t.detach().requires_grad_(True) for t in (given.q, given.k, given.v)]
    with torch.enable_grad():
        out, lse = reference_attention(replace(given, q=leaves[0], k=leaves[1], v=leaves[2]))
    if not out.requires_grad:  # no row has a block
        return tuple(torch.zeros_like(t, dtype=wide) for t in leaves)  # type: ignore[return-value]
    dout, part = inputs.dout.to(wide), out.detach().to(wide)
    weight = torch.exp(lse.detach() - inputs.lse.masked_fill(torch.isneginf(inputs.lse), torch.inf))
    dlse = weight * (dout * part).sum(-1) - weight * inputs.delta()
    grads = torch.autograd.grad((out, lse), leaves, ((weight[..., None] * dout).to(out.dtype), dlse.to(lse.dtype)))
    return tuple(grad.to(wide) for grad in grads)  # type: ignore[return-value]
