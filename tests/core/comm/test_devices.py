"""The GPU that is current on each rank: the launcher's, or after `enable` the model's. GPUs are mocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dbsp_core import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_diffusers.devices import require_own_gpus, use_model_device


class ModelOnDevice(torch.nn.Module):
    """A model whose weights say that they are on a device, and that may be offloaded from another."""

    def __init__(self, device: str, offloaded_from: str | int | None = None) -> None:
        super().__init__()
        self._device = torch.device(device)
        if offloaded_from is not None:
            self._hf_hook = SimpleNamespace(execution_device=offloaded_from)

    def parameters(self, recurse: bool = True) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(device=self._device)


@contextlib.contextmanager
def gpus(number: int, variables: Mapping[str, str], current: int = 0) -> Iterator[list[int]]:
    """Sets environment variables and a torch.cuda with GPUs; yields the devices that were current."""
    seen = [current]
    with (
        mock.patch.dict("os.environ", variables),
        mock.patch.multiple(
            torch.cuda,
            is_available=lambda: number > 0,
            device_count=lambda: number,
            current_device=lambda: seen[-1],
            set_device=lambda device: seen.append(torch.device(device).index),
            get_device_properties=lambda device: SimpleNamespace(uuid=f"GPU-{torch.device(device).index}"),
        ),
    ):
        yield seen


def model_device(
    rank: int, world: int, devices: Sequence[tuple[str, str | int | None]], backend: str, current: Sequence[int]
) -> tuple[int, str, list[str]]:
    """Returns the current GPU after `use_model_device`, its error and its warnings."""
    said: list[str] = []
    group = SequenceGroup.from_group()
    group.control()  # made before the group claims another backend
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (
        gpus(4, variables, current[rank]) as seen,
        mock.patch("torch.distributed.get_backend_config", return_value=backend),
        mock.patch.object(log, "warning", said.append),
    ):
        try:
            fingerprints = use_model_device([ModelOnDevice("cpu"), ModelOnDevice(*devices[rank])], group)
            require_own_gpus(group, group.gather_integers(fingerprints))
        except UserError as error:
            return seen[-1], str(error), said
        return seen[-1], "", said


def splits_of_the_default_group(rank: int, world: int) -> tuple[bool, str, list[int]]:
    """Groups made next to a default group that is bound to a GPU, as by `init_process_group(device_id=…)`.

    Returns whether torch would split one off it, the default group's device afterwards, and a part's ranks.
    """
    default = dist.distributed_c10d._get_default_group()
    own = dist.new_group(list(range(world)))
    default.bound_device_id = torch.device("cuda", rank)
    try:
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", return_value=None) as split:
            group = SequenceGroup.from_group(own)
            part = group.part(rank // 2 * 2, 2)
            ranks = [other for (other,) in part.gather_integers([rank])]
            group.control()
        return split.called, str(default.bound_device_id), ranks
    finally:
        default.bound_device_id = None
        dist.destroy_process_group(own)


def first_uses(rank: int, world: int, backend: str) -> list[tuple[str, str]]:
    """Returns (group, device) of each collective while a part on `backend` and an auxiliary are made."""
    uses: list[tuple[str, str]] = []
    group, config, barrier = dist.new_group(list(range(world))), dist.get_backend_config, dist.barrier

    def noted(kind: str, group: dist.ProcessGroup) -> None:
        uses.append((group.group_name.partition("/dbsp-")[2], kind))

    with (
        gpus(world, {}, current=rank),
        mock.patch.object(torch.cuda, "current_stream"),
        mock.patch.object(torch, "zeros", lambda size, device: SimpleNamespace(device=torch.device(device))),
        mock.patch.multiple(
            dist,
            get_backend_config=lambda one: backend if "ranks" in one.group_name else config(one),
            all_reduce=lambda tensor, group: noted(str(tensor.device), group),
            barrier=lambda group: noted("barrier", group),
        ),
    ):
        ranks = SequenceGroup.from_group(group)
        for _ in range(2):
            ranks.part(rank // 2 * 2, 2)
            ranks.auxiliary("reports")
    barrier()  # or the group would go while others connect
    dist.destroy_process_group(group)
    return uses


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
