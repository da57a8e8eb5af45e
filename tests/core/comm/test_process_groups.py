"""Options of the groups that db-SP makes from a process group. No NCCL here: its options are mocks."""

from __future__ import annotations

from copy import copy
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed import distributed_c10d

from dbsp_core.comm import process_groups
from dbsp_core.comm.process_groups import subgroup


class MockNcclOptions:
    """`ProcessGroupNCCL.Options`, whose `config` is copied when it is assigned."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)
        self.__dict__["config"] = {"max_ctas": None}
        self.split_from = None
        self.group_name = ""

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = copy(value) if name == "config" else value


def make_groups(rank: int, world: int) -> dict[str, Any]:
    """Makes a part over "NCCL" and a group over gloo. Returns the options that torch was given for them."""
    parent = MockNcclOptions(is_high_priority_stream=True)
    parent._timeout, parent.config["max_ctas"] = timedelta(seconds=77), 8
    parent.split_from, parent.group_name = "another group", "0"
    given, make = {}, distributed_c10d._new_process_group_helper

    def record(size: int, rank: int, ranks: list[int], backend: str, *args: Any, **options: Any) -> Any:
        given[backend] = options.pop("backend_options"), options["timeout"]
        return make(size, rank, ranks, "gloo", *args, **options)

    with (
        patch.object(process_groups, "_backend_options", lambda group: iter([object(), parent])),
        patch.object(distributed_c10d, "_new_process_group_helper", record),
    ):
        for purpose, backend in (("a part", "nccl"), ("for host tensors", "gloo")):
            subgroup(dist.group.WORLD, purpose, range(world), backend)
    of_part, timeout = given["nccl"]
    of_part.config["max_ctas"] += 1
    return {
        "kept": (of_part.is_high_priority_stream, of_part._timeout, of_part.config["max_ctas"] - 1, timeout),
        "not kept": (of_part.split_from, of_part.group_name),
        "parent's": parent.config["max_ctas"],
        "gloo": given["gloo"],
    }


def test_parts_have_the_options_of_their_group(pool):
    timeout = timedelta(seconds=77)
    for found in pool(2).run(make_groups):
        assert found["kept"] == (True, timeout, 8, timeout)
        assert found["not kept"] == (None, ""), "torch sets these for each group"
        assert found["parent's"] == 8, "the part's options are not the parent's"
        assert found["gloo"] == (None, timeout)
