"""The backward of one attention on one rank, with the tables of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from dbsp_core.comm.exchange import LocalKeys
from dbsp_core.comm.exchange_backward import LocalGradients, gradient_to_owners
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_kernels import BackwardInputs, Kernel, KernelInputs, block_attention_backward


def attention_backward(
    prepared: PreparedAttention, saved: Sequence[torch.Tensor], dout: torch.Tensor, scale: float, kernel: Kernel
) -> tuple[torch.Tensor, ...]:
    """Computes the gradients of q, k and v, [B, H, n_local, D] each. Collective.

    Args:
        saved: Rows [B·Rq, Bq, D], the first chunk [2, B, Ck, Bk, D], the rows' output and log-sum-exp [B·Rq, Bq]; with
            more chunks also k and v [B, H, n_local, D].
        dout: [B, H, n_local, D], gradient of the output.
        kernel: A kernel with a backward.
    """
    rows, first, out, lse, *local_kv = saved
    route, group, wide = prepared.route, prepared.group, lse.dtype
    k, v = local_kv or (dout, dout)  # dout is a placeholder if there are no later chunks
    # 1. Send dOut to the owners of rows, like queries
    dout_rows = gradient_to_owners(route, dout, group).view(rows.shape)
    # 2. For all chunks again: accumulate dQ; send dK and dV back while the kernel runs on the next chunk
    slots = kernel.slots and kernel.slots(rows, (prepared.plan.grid.block_q, prepared.plan.grid.block_k))
    tables = prepared.tables.expanded(len(dout), slots)

    def of_chunk(number: int, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one chunk's contribution to dq [B·Rq, Bq, D], and its dk and dv [2, B, Ck, Bk, D].

        Uses the whole attention's log-sum-exp, so contributions just add up.
        """
        bits, transposed = prepared.tables.bits[number], prepared.table_layout.transposed[number]
        keys, values = kv.flatten(1, 2).unbind(0)
        forward = KernelInputs(rows, keys, values, **vars(tables[number]), scale=scale)
        turned = partial(transposed.table, bits, kv.shape[1], slots)
        dq, dk, dv = block_attention_backward(BackwardInputs(forward, dout_rows, out, lse, turned), kernel)
        return dq, torch.stack([dk, dv]).view(kv.shape)

    dq, dkv = torch.zeros_like(rows, dtype=wide), []
    gradients = LocalGradients.zeros(route, group, dout.shape, lse)
    for number, chunk in enumerate(route.chunks([first], LocalKeys(k, v), group)):
        dq_part, here = of_chunk(number, chunk)
        del chunk  # free before the next arrives
        dq += dq_part
        if number == 0:
            dkv.append(here)
        else:
            gradients.add_chunk(number, here)
        del here
    # 3. Send back dQ and the first chunk's dK and dV, summed over the readers of each key
    grads = gradients.finish(dq.view(len(dout), -1, dout.shape[3]), dkv.pop())
    return tuple(grad.to(rows.dtype) for grad in grads)
