"""The GPU that is current on each rank: the launcher's for programs that db-SP starts, the model's after `enable`."""

from __future__ import annotations

import pytest

from dbsp_core.utils.errors import UserError
from tests.core.comm.device_cases import first_uses, local_device, model_device, splits_of_the_default_group

NCCL, GLOO = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:gloo"
FRESH = (0, 0)
"""The current GPU of ranks that have not called set_device."""


@pytest.mark.parametrize(
    ("gpus", "variables", "expected"),
    [
        (8, {"LOCAL_RANK": "5"}, ("cuda:5", 5)),
        (8, {"LOCAL_RANK": ""}, ("cuda:0", 0)),
        (1, {"LOCAL_RANK": "5"}, ("cuda:0", 0)),
        (0, {"LOCAL_RANK": "5"}, ("cpu", 0)),
    ],
    ids=["torchrun", "alone", "one GPU is visible to each rank", "no GPU"],
)
def test_program_uses_the_gpu_of_its_local_rank(gpus, variables, expected):
    assert local_device(gpus, variables) == expected


@pytest.mark.parametrize(
    "variables",
    [{"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": ""}, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "6"}],
    ids=["it", "another"],
)
def test_rank_without_a_gpu_raises(variables):
    with pytest.raises(UserError, match="local rank 5 has no GPU: this node has 4; start one process per GPU"):
        local_device(4, variables)


@pytest.mark.parametrize(
    ("devices", "current", "expected"),
    [
        ([("cuda:3", None), ("cuda:2", None)], FRESH, [3, 2]),
        ([("cuda:3", None), ("cuda:2", None)], (3, 2), [3, 2]),
        ([("cpu", None), ("cpu", None)], FRESH, [0, 1]),
        ([("cpu", None), ("cpu", None)], (3, 2), [3, 2]),
        ([("cpu", "cuda:2"), ("meta", 3)], FRESH, [2, 3]),
        ([("cpu", "cuda"), ("cpu", "cuda")], FRESH, [0, 1]),
    ],
    ids=["in another order", "set", "on the CPU", "on the CPU, set", "offloaded", "offloaded, no index"],
)
def test_gpu_of_the_model_becomes_current(pool, devices, current, expected):
    assert pool(2).run(model_device, devices, NCCL, current) == [(gpu, "", []) for gpu in expected]


@pytest.mark.parametrize("devices", [[("cuda:0", None)] * 2, [("cpu", "cuda:0")] * 2], ids=["moved", "offloaded"])
class TestSharedGPU:
    def test_over_nccl_all_ranks_raise(self, pool, devices):
        for _, error, said in pool(2).run(model_device, devices, NCCL, FRESH):
            assert error.startswith("ranks [0, 1] run their model on one and the same GPU; on every rank, first call")
            assert 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))' in error
            assert 'pipe.to(f"cuda:{rank}")' in error
            assert said == []

    def test_over_gloo_one_rank_warns(self, pool, devices):
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
