"""When ranks of a ring are done with their steps: by hand, against events played through, and between bounds."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_core import Strategy
from scripts.reproduce.lockstep import ring_times

RING = Strategy(1, 2)


def test_two_ranks_by_hand():
    compute = np.array([[5.0, 1.0], [1.0, 5.0], [2.0, 3.0]])
    times = ring_times(compute, [0.0, 0.0], RING, 1.0)
    assert times.attention_s == 9.0, (
        "the second begins with what it got at 0: at 1, 6, done at 9; the first at 5, 6, 8"
    )
    assert times.steps == ((1.0, 0.0), (5.0, 0.0), (3.0, 0.0))
    assert (times.compute_s, times.exposed_s) == (9.0, 0.0)


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_overlap_lies_between_the_longer_and_the_sum(overlap):
    compute = np.array([[5.0], [2.0], [6.0]]).repeat(3, axis=1)
    times = ring_times(compute, [3.0, 4.0], Strategy(1, 3), overlap)
    assert times.attention_s == 15 + (1 - overlap) * 5
    assert times.exposed_s == 2 + (1 - overlap) * 5


@pytest.mark.parametrize("strategy", [Strategy(1, 5), Strategy(2, 3), Strategy(3, 2), Strategy(1, 8)], ids=str)
def test_ranks_that_run_ahead_are_between_even_totals_and_waiting_for_all(strategy):
    generator = np.random.default_rng(strategy.ring)
    for _ in range(20):
        compute = generator.gamma(1.0, size=(strategy.ring, strategy.world))
        p2p = generator.gamma(0.2, size=strategy.ring - 1).tolist()
        found = ring_times(compute, p2p, strategy, 1.0).attention_s
        assert found == pytest.approx(max(played(compute, p2p, strategy)))
        assert compute.sum(axis=0).max() <= found
        assert found <= np.maximum(compute.max(axis=1), [*p2p, 0.0]).sum() + 1e-12
    free = [0.0] * (strategy.ring - 1)
    even = np.ones_like(compute)
    assert ring_times(even, free, strategy, 1.0).attention_s == strategy.ring


def played(compute: np.ndarray, p2p: list[float], strategy: Strategy) -> list[float]:
    """When each rank is done, asked backwards: a rank's start of a ring step from those of the step before."""
    y, x = strategy.ring, strategy.ulysses

    def start(rank: int, step: int) -> float:
        if step == 0:
            return 0.0
        ring_rank, column = divmod(rank, x)
        around = [(ring_rank + shift) % y * x + column for shift in (-1, 0, 1)]
        sent = max(start(other, step - 1) for other in around) + p2p[step - 1]
        return max(start(rank, step - 1) + float(compute[step - 1, rank]), sent)

    return [start(rank, y - 1) + float(compute[-1, rank]) for rank in range(strategy.world)]
