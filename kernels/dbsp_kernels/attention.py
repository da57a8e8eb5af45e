"""Entry points of all kernels: `block_attention` and its backward, with input checks."""

from __future__ import annotations

import os

import torch

from dbsp_kernels.inputs import BackwardInputs, Gradients, KernelInputs, PartialAttention, merge_into
from dbsp_kernels.kernel import Kernel, KernelRequirements, choose_kernel
from dbsp_kernels.row_parts import RowParts


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    scale: float | None = None,
    kernel: str | Kernel = "auto",
    kv_full: torch.Tensor | None = None,
    row_schedule: torch.Tensor | None = None,
    parts: RowParts | None = None,
    partial: PartialAttention | None = None,
    out_dtype: torch.dtype | None = None,
    head_tokens: int | None = None,
    lse: bool = True,
    check: bool = True,
) -> PartialAttention:
    """Computes attention of packed query rows over packed KV blocks, whichever heads they belong to.

    Args:
        q: [Rq, Bq, D], one query block per row.
        k: [Ck, Bk, D], KV blocks, in any order.
        v: [Ck, Bk, D].
        kv_index: int32[Rq, max], the blocks each row attends to: the first `kv_count` of its entries.
        kv_count: int32[Rq].
        kv_len: int32[Ck], real tokens of each KV block, 1..Bk; those beyond are masked.
        scale: Softmax scale; default D^−1/2.
        kernel: A name from `KERNELS`, "auto", or a `Kernel` from `choose_kernel` (not checked again).
        kv_full: int32[Rq], number of leading entries of each row that are full blocks of Bk tokens, without masking.
        row_schedule: int32[Rq], a permutation: the order in which rows start. Default: in order.
        parts: Rows with long ones cut by keys, from `cut_rows`; replaces `row_schedule`. For kernels with `slots`
            only.
        partial: Contiguous result over other keys to merge into. Its lse is overwritten, and its out unless
            `out_dtype` differs from its dtype.
        out_dtype: Dtype of out; default that of `partial`, or q's.
        head_tokens: Tokens per head, if rows and blocks are those of whole heads in order, where only the last query
            block and last KV block of a head may be short. For kernels that support whole heads only.
        lse: False if the caller ignores the log-sum-exp; allows kernels that return NaN for it.
        check: False skips input checks, for inputs like those of an earlier call.

    Returns:
        out [Rq, Bq, D] and lse [Rq, Bq] of `lse_dtype` (natural log); a row without blocks has out 0, lse −inf.

    Raises:
        ValueError: Shapes, dtypes or devices mismatch or the kernel does not support them. On CPU, and with
            DBSP_DEBUG=1 on any device (costs a synchronization): wrong counts, indices or hints.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    inputs = KernelInputs(
        q, k, v, kv_index, kv_count, kv_len, scale, kv_full, row_schedule, partial, out_dtype, head_tokens, parts
    )
    if check:
        inputs.check()
        if checks_values(q.device):
            inputs.check_values()
    if isinstance(kernel, str):
        lse = lse or partial is not None
        needs = KernelRequirements(inputs.blocks, q.shape[2], lse, head_tokens is None, head_tokens)
        kernel = choose_kernel(kernel, q.device, q.dtype, needs)
    if parts is not None and kernel.slots is None:
        raise ValueError(f"kernel {kernel.name!r} does not support cut rows; pass row_schedule instead of parts")
    result = kernel.run(inputs)
    if kernel.merges:
        return result
    if partial is not None:
        merge_into(*partial, *result)
        result = partial
    return result if out_dtype is None else (result[0].to(out_dtype), result[1])


def checks_values(device: torch.device) -> bool:
    """Returns True if `block_attention` checks table values: on CPU, or on any device with DBSP_DEBUG=1."""
    return device.type == "cpu" or os.environ.get("DBSP_DEBUG", "0") not in ("", "0")


def block_attention_backward(inputs: BackwardInputs, kernel: str | Kernel = "auto") -> Gradients:
    """Returns the gradients of one `block_attention` call, bitwise deterministic.

    They are dq [Rq, Bq, D], dk and dv [Ck, Bk, D], float32 (float64 for float64). Raises ValueError for a kernel
    without backward.
    """
    q = inputs.forward.q
    if isinstance(kernel, str):
        needs = KernelRequirements(inputs.forward.blocks, q.shape[2], lse=True, ragged_rows=True, backward=True)
        kernel = choose_kernel(kernel, q.device, q.dtype, needs)
    if kernel.backward is None:
        raise ValueError(f"kernel {kernel.name!r} has no backward")
    return kernel.backward(inputs)
