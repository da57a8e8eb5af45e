"""Dense rows on the CPU, where torch has no fused kernel that db-SP uses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch

from dbsp_core.runtime import chunk_attention
from dbsp_kernels import dense


@contextlib.contextmanager
def dense_rows_on_the_cpu() -> Iterator[list[torch.Size]]:
    """Runs dense rows apart from the others in this process, within a block. Yields the shapes of q of all calls."""
    shapes: list[torch.Size] = []

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        shapes.append(q.shape)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        return out, lse

    kernel = dense.FusedKernel("cpu", lambda inputs: True, run)
    with (
        patch.object(chunk_attention, "fused_kernel", return_value="cpu"),
        patch.object(dense, "_chosen", return_value=kernel),
    ):
        yield shapes
