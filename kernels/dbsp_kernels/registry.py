"""Which kernels there are, what each can do, and the one entry point to them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_kernels import cpu
from dbsp_kernels.reference import reference_attention

__all__ = ["KERNELS", "Kernel", "available", "block_attention", "choose_kernel"]

_FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


def _nothing_missing() -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """A kernel and its capabilities.

    devices: device types it runs on; dtypes: of q, k, v
    missing: says why it cannot work on this machine, or None
    """

    name: str
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype] = _FLOATS
    returns_lse: bool = True
    ragged_rows: bool = True
    missing: Callable[[], str | None] = _nothing_missing

    def cannot_serve(self, device: str, dtype: torch.dtype) -> str | None:
        """Why this kernel cannot serve such tensors here, or None."""
        if device not in self.devices:
            return f"it runs on {', '.join(sorted(self.devices))}, the tensors are on {device}"
        if dtype not in self.dtypes:
            return f"it takes {', '.join(sorted(str(d) for d in self.dtypes))}, the tensors are {dtype}"
        return self.missing()


def _run_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from dbsp_kernels.triton_forward import triton_attention  # here: triton need not be installed

    return triton_attention(*args)


def _triton_missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; pip install 'dbsp-attention[gpu]'"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "there is no GPU, and TRITON_INTERPRET=1 is not set"
    return None


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("cpu", cpu.cpu_attention, frozenset({"cpu"}), missing=cpu.missing),
        Kernel(
            "triton",
            _run_triton,
            frozenset({"cuda", "cpu"}) if os.environ.get("TRITON_INTERPRET") == "1" else frozenset({"cuda"}),
            _FLOATS - {torch.float64},
            missing=_triton_missing,
        ),
        Kernel("reference", reference_attention, frozenset({"cpu", "cuda"})),
    )
}
"""By name, in the order in which "auto" prefers them."""


def available(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[str]:
    """Names of the kernels that can serve tensors of `dtype` on `device` here, best first."""
    return [name for name, kernel in KERNELS.items() if kernel.cannot_serve(device, dtype) is None]


def choose_kernel(name: str, device: str, dtype: torch.dtype) -> Kernel:
    """The kernel called `name`; "auto" is $DBSP_KERNEL if set, else the best that can serve `dtype` on `device`.

    Raises ValueError, naming one that can, when the kernel is unknown or cannot serve.
    """
    usable = available(device, dtype)
    wanted = (os.environ.get("DBSP_KERNEL") or "auto") if name == "auto" else name
    if wanted == "auto":
        if not usable:
            raise ValueError(f"no attention kernel serves {dtype} on {device}; use float32, float16 or bfloat16")
        return KERNELS[usable[0]]
    if wanted not in KERNELS:
        raise ValueError(f"unknown kernel {wanted!r}; use auto or one of {', '.join(KERNELS)}")
    reason = KERNELS[wanted].cannot_serve(device, dtype)
    if reason is not None:
        instead = " or ".join(usable) or "another dtype"
        raise ValueError(f"kernel {wanted!r} cannot be used here: {reason}; use {instead}")
    return KERNELS[wanted]


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    scale: float | None = None,
    kernel: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed query rows over packed KV blocks. Heads are gone: a row is a row.

    q:        [Rq, Bq, D], one query block per row
    k, v:     [Ck, Bk, D], KV blocks, wherever they landed
    kv_index: int32[Rq, max], the blocks each row attends to: the first kv_count of its entries
    kv_count: int32[Rq]
    kv_len:   int32[Ck], real tokens of each KV block, 1..Bk; those beyond are masked
    scale:    of the scores, default D^−1/2
    returns:  out [Rq, Bq, D] in q's dtype, lse float32[Rq, Bq] (natural log); a row without blocks has out 0, lse −inf
    Raises ValueError for mismatched shapes, dtypes or devices, a count above the table's width, an index outside the
    packed blocks (checked on CPU only, where it costs no synchronisation), or a kernel that cannot serve.
    """
    _check(q, k, v, kv_index, kv_count, kv_len)
    chosen = choose_kernel(kernel, q.device.type, q.dtype)
    return chosen.run(q, k, v, kv_index, kv_count, kv_len, q.shape[-1] ** -0.5 if scale is None else scale)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_index: torch.Tensor,
    kv_count: torch.Tensor,
    kv_len: torch.Tensor,
) -> None:
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"expected q [rows, block_q, D] and k, v [blocks, block_k, D], got q {tuple(q.shape)}, "
            f"k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if kv_index.ndim != 2 or len(kv_index) != len(q) or kv_count.shape != q.shape[:1] or kv_len.shape != k.shape[:1]:
        raise ValueError(
            f"expected kv_index [{len(q)}, max], kv_count [{len(q)}], kv_len [{len(k)}], got {tuple(kv_index.shape)}, "
            f"{tuple(kv_count.shape)}, {tuple(kv_len.shape)}"
        )
    if any(table.dtype != torch.int32 for table in (kv_index, kv_count, kv_len)):
        raise ValueError("kv_index, kv_count and kv_len must be int32")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    devices = {str(t.device) for t in (q, k, v, kv_index, kv_count, kv_len)}
    if len(devices) > 1:
        raise ValueError(f"q, k, v and the tables must be on one device, got {', '.join(sorted(devices))}")
    if q.device.type == "cpu":
        _check_ranges(kv_index, kv_count, kv_len, blocks=k.shape[0], block=k.shape[1])


def _check_ranges(
    kv_index: torch.Tensor, kv_count: torch.Tensor, kv_len: torch.Tensor, blocks: int, block: int
) -> None:
    width = kv_index.shape[1]
    if len(kv_count) and not 0 <= int(kv_count.min()) <= int(kv_count.max()) <= width:
        raise ValueError(f"kv_count must lie between 0 and the table's width {width}")
    if blocks and not 1 <= int(kv_len.min()) <= int(kv_len.max()) <= block:
        raise ValueError(f"kv_len must lie between 1 and block_k = {block}")
    used = kv_index[torch.arange(width) < kv_count[:, None]]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < blocks:
        raise ValueError(f"kv_index must lie between 0 and {blocks - 1}, the last packed KV block")
