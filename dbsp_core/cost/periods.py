"""When ranks are done with the periods of one attention, from each rank's compute and what travels beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

__all__ = ["PeriodTimes", "chunk_times", "of_the_last"]


@dataclass(frozen=True)
class PeriodTimes:
    """All periods of one attention.

    Attributes:
        periods: (compute_s, p2p_s) of each on the rank that is done last; compute includes the kernel's launch and the
            merge, P2P is what the next period needs: 0 in the last.
        attention_s: From the first period's start until the last rank is done.
    """

    periods: tuple[tuple[float, float], ...]
    attention_s: float

    @property
    def compute_s(self) -> float:
        """Compute of all periods of the rank that is done last, as if it waited for nothing."""
        return sum(compute for compute, _ in self.periods)

    @property
    def exposed_s(self) -> float:
        """What that rank waits: for transfers that compute does not hide, and for its neighbours."""
        return self.attention_s - self.compute_s


def chunk_times(compute: np.ndarray, transfers: Sequence[float], overlap: float) -> PeriodTimes:
    """Ranks wait for further chunks alone: one is there when the busiest rank's is, requested a kernel before its own.

    Args:
        compute: float64[chunks, P], seconds.
        transfers: Seconds of the exchange of each chunk after the first.
        overlap: Share of the shorter of compute and transfer that hides behind the longer.
    """
    done = np.zeros(compute.shape[1])
    for kernel_s, transfer_s in zip(compute, [*transfers, 0.0], strict=True):
        done = np.maximum(done + kernel_s, done + transfer_s)
    hidden = compute.sum(axis=0) + sum(transfers) - done
    return of_the_last(compute, transfers, done + (1 - overlap) * hidden)


def of_the_last(compute: np.ndarray, p2p: Sequence[float], done: np.ndarray) -> PeriodTimes:
    last = int(done.argmax())
    periods = tuple((float(c), float(p)) for c, p in zip_longest(compute[:, last], p2p, fillvalue=0.0))
    return PeriodTimes(periods, float(done[last]))
