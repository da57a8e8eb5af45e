"""Which strategies a kernel can serve."""

from __future__ import annotations

from dbsp_core.errors import UserError
from dbsp_kernels import KERNELS

__all__ = ["kernel_merges"]


def kernel_merges(kernel: str) -> bool:
    """Whether a kernel returns the log-sum-exp that rings merge by; "auto" is chosen to.

    Raises ValueError for an unknown name.
    """
    if kernel not in ("auto", *KERNELS):
        raise UserError(f"unknown kernel {kernel!r}; use auto or one of {', '.join(KERNELS)}")
    return kernel == "auto" or KERNELS[kernel].returns_lse
