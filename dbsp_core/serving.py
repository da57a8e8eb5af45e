"""Which strategies a kernel can serve."""

from __future__ import annotations

from dbsp_core.strategy import Strategy
from dbsp_kernels import KERNELS, Kernel

__all__ = ["kernel_merges", "require_served"]


def kernel_merges(kernel: str) -> bool:
    """Whether a kernel returns the log-sum-exp that rings merge by; "auto" is chosen to."""
    return kernel == "auto" or (kernel in KERNELS and KERNELS[kernel].returns_lse)


def require_served(strategy: Strategy, kernel: str) -> None:
    """Raises ValueError when the kernel is unknown, or returns no log-sum-exp and the strategy has a ring to merge.

    kernel: a name from dbsp_kernels.KERNELS, "auto" (which is chosen to serve), or "sparge" (SpargeAttn's own, §6.1)
    """
    if kernel in ("auto", *KERNELS):
        able = kernel == "auto" or KERNELS[kernel].returns_lse
    elif kernel == "sparge":
        able = False
    else:
        raise ValueError(f"unknown kernel {kernel!r}; use auto or one of {', '.join((*KERNELS, 'sparge'))}")
    if strategy.ring > 1 and not able:
        others = ", ".join(name for name, one in KERNELS.items() if _merges(one))
        raise ValueError(
            f"kernel {kernel!r} returns no log-sum-exp, so it cannot serve {strategy}, whose {strategy.ring} periods "
            f"are merged by it; use U{strategy.world}R1, or kernel {others}"
        )


def _merges(kernel: Kernel) -> bool:
    return kernel.returns_lse
