"""The reference kernel: plain torch in fp32 (fp64 for fp64 input), short enough to trust by reading."""

from __future__ import annotations

import torch

from dbsp_kernels.inputs import KernelInputs, PartialAttention, backward_by_autograd, lse_dtype
from dbsp_kernels.kernel import Kernel

__all__ = ["KERNEL", "reference_attention"]


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


KERNEL = Kernel(
    name="reference",
    run=reference_attention,
    backward=backward_by_autograd(reference_attention),
    devices=frozenset({"cpu", "cuda"}),
    auto_on=frozenset({"cpu"}),  # on CUDA a loop over rows would take hours
)
