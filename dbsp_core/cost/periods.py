"""When ranks are done with the periods of one attention, from each rank's compute and what travels beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from dbsp_core.layout.strategy import Strategy

__all__ = ["PeriodTimes", "chunk_times", "of_the_last", "ring_times"]


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


def ring_times(compute: np.ndarray, p2p: Sequence[float], strategy: Strategy, overlap: float) -> PeriodTimes:
    """A ring, whose ranks wait for their neighbours alone: a fast one runs up to a period ahead of the next.

    A hand-over begins when both of its ranks have begun the period, and the next period when this one's kernel and the
    hand-overs to and from the rank are done.

    Args:
        compute: float64[periods, P], seconds.
        p2p: Seconds of the hand-over beside each period; without the last period's where there is none.
        overlap: Share of the shorter of compute and P2P that hides behind the longer.
    """
    done = began = np.zeros((strategy.ring, strategy.ulysses))
    for period, own in enumerate(compute.reshape(-1, *began.shape)):
        done = began + own
        if period < len(p2p):
            transfer_s = p2p[period]
            met = np.maximum(began, np.maximum(np.roll(began, 1, axis=0), np.roll(began, -1, axis=0)))
            done = np.maximum(done, met + transfer_s) + (1 - overlap) * np.minimum(own, transfer_s)
        began = done
    return of_the_last(compute, p2p, done.ravel())


def chunk_times(compute: np.ndarray, p2p: Sequence[float], overlap: float, at_once: bool) -> PeriodTimes:
    """Keys in chunks, whose ranks wait for further chunks alone: these are there when the busiest rank's are.

    The transfer of what the next period needs starts with its period; or, `at_once`, all follow one another from the
    first period on. Other arguments are those of `ring_times`; the last period has no transfer.
    """
    done, came = np.zeros(compute.shape[1]), 0.0
    for period_s, transfer_s in zip(compute, [*p2p, 0.0], strict=True):
        began = np.maximum(done, came)
        done = began + period_s
        if at_once:
            came += transfer_s
        else:
            done = np.maximum(done, began + transfer_s)
    hidden = compute.sum(axis=0) + sum(p2p) - done
    return of_the_last(compute, p2p, done + (1 - overlap) * hidden)


def of_the_last(compute: np.ndarray, p2p: Sequence[float], done: np.ndarray) -> PeriodTimes:
    last = int(done.argmax())
    periods = tuple((float(c), float(p)) for c, p in zip_longest(compute[:, last], p2p, fillvalue=0.0))
    return PeriodTimes(periods, float(done[last]))
