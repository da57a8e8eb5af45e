"""Rates that nothing exceeds here, and torch's choice for dense attention."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from dbsp_kernels import fused_kernel
from scripts.checks.gpu.results import Case, Row
from scripts.checks.gpu.setting import Setting


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("matrix products and copies", partial(rates, setting), alone=True)
    yield Case("dense attention", partial(choices, setting))


def rates(setting: Setting) -> Iterator[Row]:
    """Times a product of random square matrices, a copy within memory, and torch's smallest launch."""
    side, numbers = (64, 1 << 10) if setting.dry else (8192, 1 << 29)
    left, right = (torch.randn(side, side, device=setting.device, dtype=setting.dtype) for _ in range(2))
    source = torch.randn(numbers, device=setting.device, dtype=setting.dtype)
    target, one = torch.empty_like(source), torch.zeros(1, device=setting.device)
    ms = setting.sampler.medians({"product": lambda i: left @ right, "copy": lambda i: target.copy_(source)})
    yield Row("product of matrices", 2 * side**3 / ms["product"] / 1e9, "TFLOP/s")
    yield Row("copy, read and written", 2 * source.nbytes / ms["copy"] / 1e9, "TB/s")
    yield Row("an addition of one number, on the host", setting.sampler.cpu_ms(lambda i: one.add_(1)) * 1e3, "µs")


def choices(setting: Setting) -> Iterator[Row]:
    """Says which fused kernel torch and db-SP choose for dense rows: 1 for the one that is chosen."""
    for head_dim in (128, 64):
        q = torch.randn(1, 1, 256, head_dim, device=setting.device, dtype=torch.bfloat16)
        if not setting.simulated:
            chosen = SDPBackend(torch._fused_sdp_choice(q, q, q, None, 0.0, False, scale=1.0))
            yield Row(f"D {head_dim}: torch chooses {chosen.name}", 1.0)
        yield Row(f"D {head_dim}: db-SP takes {fused_kernel(q) or 'the block kernel'}", 1.0)
