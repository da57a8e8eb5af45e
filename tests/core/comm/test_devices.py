"""The GPU that is current on each rank: the launcher's for programs that db-SP starts, the model's after `enable`."""

from __future__ import annotations

import pytest

from tests.core.comm.device_cases import first_uses, model_device, splits_of_the_default_group

NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
FRESH = (0, 0)
"""The current GPU of ranks that have not called set_device."""


@pytest.mark.parametrize(
    ("devices", "current", "expected"),
    [
        ([("cuda:3", None), ("cuda:2", None)], FRESH, [3, 2]),
        ([("cpu", None), ("cpu", None)], FRESH, [0, 1]),
        ([("cpu", None), ("cpu", None)], (3, 2), [3, 2]),
        ([("cpu", "cuda:2"), ("meta", 3)], FRESH, [2, 3]),
    ],
    ids=["in another order", "on the CPU", "on the CPU, set", "offloaded"],
)
def test_gpu_of_the_model_becomes_current(pool, devices, current, expected):
    assert pool(2).run(model_device, devices, NCCL, current) == [(gpu, "", []) for gpu in expected]


def test_ranks_that_share_a_gpu_raise_over_nccl_and_warn_over_gloo(pool):
    devices = [("cpu", "cuda:0"), ("cuda:0", None)]
    for _, error, said in pool(2).run(model_device, devices, NCCL, FRESH):
        assert error.startswith("ranks [0, 1] run their model on the same GPU; on every rank, first call")
        assert said == []
    (_, *first), (_, *second) = pool(2).run(model_device, devices, GLOO, FRESH)
    assert (first[0], second) == ("", ["", []])
    assert [line[:20] for line in first[1]] == ["ranks [0, 1] run the"]


def test_groups_next_to_a_default_group_bound_to_a_gpu_are_not_split(pool):
    """Guards against a split, which needs all ranks of the default group: a part is made by its own ranks alone."""
    for rank, found in enumerate(pool(4).run(splits_of_the_default_group)):
        assert found == (False, f"cuda:{rank}", [rank // 2 * 2, rank // 2 * 2 + 1])


@pytest.mark.parametrize(
    ("backend", "kinds"), [(GLOO, ["barrier"]), ("cuda:nccl", ["cuda:{}"]), (NCCL, ["cpu", "cuda:{}"])]
)
def test_new_group_is_used_once_by_all_its_ranks(pool, backend, kinds):
    """Guards against a hang of NCCL, whose first uses make communicators, if ranks use them in different orders."""
    for rank, uses in enumerate(pool(4).run(first_uses, backend)):
        part = f"ranks {rank // 2 * 2} to {rank // 2 * 2 + 1}"
        assert uses == [*((part, kind.format(rank)) for kind in kinds), ("reports", "barrier")]
