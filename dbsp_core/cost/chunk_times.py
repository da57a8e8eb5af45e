"""When ranks are done with the chunks of one attention, from each rank's compute and what travels beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

__all__ = ["ChunkTimes", "chunk_times", "of_the_last"]


@dataclass(frozen=True)
class ChunkTimes:
    """All chunks of one attention.

    Attributes:
        chunks: (compute_s, transfer_s) of each on the rank that is done last; compute includes the kernel's launch and
            the merge, the transfer is what the next chunk needs: 0 in the last.
        attention_s: From the first kernel's start until the last rank is done.
    """

    chunks: tuple[tuple[float, float], ...]
    attention_s: float

    @property
    def compute_s(self) -> float:
        """Compute of all chunks of the rank that is done last, as if it waited for nothing."""
        return sum(compute for compute, _ in self.chunks)

    @property
    def exposed_s(self) -> float:
        """What that rank waits: for transfers that compute does not hide, and in lockstep for its neighbours."""
        return self.attention_s - self.compute_s


def chunk_times(compute: np.ndarray, transfers: Sequence[float], overlap: float) -> ChunkTimes:
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


def of_the_last(compute: np.ndarray, transfers: Sequence[float], done: np.ndarray) -> ChunkTimes:
    """Returns the times of the rank that is done last, from `done` float64[P] and the arguments of `chunk_times`."""
    last = int(done.argmax())
    chunks = tuple((float(c), float(t)) for c, t in zip_longest(compute[:, last], transfers, fillvalue=0.0))
    return ChunkTimes(chunks, float(done[last]))
