"""Dense rows on torch's fused kernel for CPUs, as they run on one for GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch

from dbsp_core.runtime import chunk_attention
from dbsp_kernels import dense


@contextlib.contextmanager
def dense_rows_on_the_cpu() -> Iterator[None]:
    """While this lasts, in this process, dense rows of tables that know them run apart from the others."""
    with (
        patch.object(chunk_attention, "fused_kernel", return_value="cpu"),
        patch.object(dense, "_operator", return_value=("cpu", _attend)),
    ):
        yield


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    return out, lse
