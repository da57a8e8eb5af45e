"""Which strategies a kernel can serve."""

from __future__ import annotations

from dbsp_core.strategy import Strategy
from dbsp_kernels import KERNELS

__all__ = ["kernel_merges", "require_served"]


def kernel_merges(kernel: str) -> bool:
    """Whether a kernel returns the log-sum-exp that rings merge by; "auto" is chosen to.

    Raises ValueError for an unknown name.
    """
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"unknown kernel {kernel!r}; use auto or one of {', '.join(KERNELS)}")
    return kernel == "auto" or KERNELS[kernel].returns_lse


def require_served(strategy: Strategy, kernel: str) -> None:
    """Raises ValueError when the kernel is unknown, or returns no log-sum-exp and the strategy has a ring to merge."""
    if not kernel_merges(kernel) and strategy.ring > 1:
        others = ", ".join(name for name, one in KERNELS.items() if one.returns_lse)
        raise ValueError(
            f"kernel {kernel!r} returns no log-sum-exp, so it cannot serve {strategy}, whose {strategy.ring} periods "
            f"are merged by it; use U{strategy.world}R1, or kernel {others}"
        )
