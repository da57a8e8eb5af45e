"""When a rank dies the others end with a clear error; and keys are passed on while kernels run."""

from __future__ import annotations

import pytest

from tests.core.robustness.fault_cases import (
    arrivals_during_kernels,
    die_in_the_middle,
    make_a_group_that_one_rank_does_not_come_to,
)
from tests.support.workers import SAFETY_NET_S, WorkerPool

MASKS = {
    "window": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16},
    "sparge": {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("strategy", ["U3R1", "U1R3"])
def test_ranks_that_live_on_end_with_a_clear_error(mask, strategy):
    workers = WorkerPool(3)
    try:
        for pipe in workers._pipes:
            pipe.send((die_in_the_middle, ({"mask": MASKS[mask]}, strategy, 1), ""))
        for rank in (0, 2):
            assert workers._pipes[rank].poll(SAFETY_NET_S), "it hangs"
            fine, kind, message, _ = workers._pipes[rank].recv()
            assert not fine
            assert kind == "CommunicationError"
            assert "one of the other ranks may have died" in message, message
    finally:
        workers.close()


def test_a_rank_that_does_not_come_where_a_group_is_made_is_told_of_clearly():
    workers = WorkerPool(2)
    try:
        alone, told = workers.run(make_a_group_that_one_rank_does_not_come_to)
        assert alone == ""
        assert "one of the other ranks may have died, or was too late" in told
    finally:
        workers.close()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_keys_are_sent_while_the_kernel_runs(pool, world):
    """Each kernel here returns only once the next slot has come: it hangs on to its end if that needed a wait."""
    assert pool(world).run(arrivals_during_kernels) == [[True] * (world - 1)] * world
