"""The CPU kernel's backward: torch's own, for rows of equal length together."""

from __future__ import annotations

import torch

from dbsp_kernels.backends.cpu import GATHER_BYTES, tail_bias
from dbsp_kernels.backward import BackwardInputs, Gradients

__all__ = ["cpu_attention_backward"]


def cpu_attention_backward(inputs: BackwardInputs) -> Gradients:
    """The contract of `dbsp_kernels.block_attention_backward`, in float32 at least.

    torch's operator takes the log-sum-exp it is given, so the whole attention's gives this call's part.
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
            bias = tail_bias(given.kv_len[blocks], k.shape[1], wide) if short else None
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[rows, None], q[rows, None], keys, values, out[rows, None], inputs.lse[rows, None],
                0.0, False, attn_mask=bias, scale=given.scale,
            )  # fmt: skip
            dq[rows] = parts[0][:, 0]
            for total, part in zip((dk, dv), parts[1:], strict=True):
                total.index_add_(0, blocks.flatten(), part[:, 0].unflatten(1, (count, -1)).flatten(0, 1))
    return dq, dk, dv
