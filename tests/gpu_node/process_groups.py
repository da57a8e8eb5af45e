"""NCCL between processes with simulated devices: gloo moves the values of device tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu_node import streams
from tests.gpu_node.faults import recorded
from tests.gpu_node.tensors import DeviceTensor, inner, require_taken

_COLLECTIVES = (
    *("_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_to_all_single", "allgather", "allreduce"),
    *("alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce", "reduce_scatter", "scatter", "send"),
)
"""Methods of `ProcessGroup` whose arguments are tensors and lists of tensors."""


def carry_nccl_over_gloo() -> None:
    """Lets `init_process_group` and `new_group` make groups over "nccl" in this process, for good.

    Such a group takes tensors on the current device only, as NCCL does. `Work.wait` is no host wait. gloo's own groups
    take host tensors only: they would copy those of a device through the host.
    """
    distributed_c10d._new_process_group_helper = _over_gloo(distributed_c10d._new_process_group_helper)
    distributed_c10d._get_object_coll_device = _object_device
    distributed_c10d.default_pg_nccl_timeout = distributed_c10d.default_pg_timeout
    torch.cuda.nccl.version = lambda: (2, 27, 0)  # type: ignore[assignment]
    for name in _COLLECTIVES:
        method = getattr(dist.ProcessGroup, name, None)
        if method is not None:
            setattr(dist.ProcessGroup, name, _checked(name, method))


def _over_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `_new_process_group_helper`, whose fourth argument is the backend."""

    @functools.wraps(make)
    def made(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **options: Any) -> Any:
        if "nccl" not in str(backend):
            return make(size, rank, ranks, backend, *args, **options)
        device = options.pop("device_id", None)
        if device is not None:
            streams.require_own(device.index, "init_process_group")
        options.pop("backend_options", None)
        group, store = make(size, rank, ranks, dist.Backend("gloo"), *args, **options)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            distributed_c10d._world.pg_map[group] = (dist.Backend(str(backend)), store)
            config = str(distributed_c10d.BackendConfig(dist.Backend(str(backend))))
            distributed_c10d._world.pg_backend_config[group] = config
        return group, store

    return made


def _object_device(group: dist.ProcessGroup | None = None) -> str:
    """Replaces `_get_object_coll_device`: where a group's tensors with pickled objects are."""
    return "cuda" if "nccl" in dist.get_backend_config(group) else "cpu"


def _checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        config = dist.get_backend_config(group)
        require_taken(name, tensors, over_nccl="nccl" in config, over_gloo="gloo" in config)
        on_device = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
        if on_device:
            recorded.launch(f"NCCL {name}", None)
            memories = [tensor.memory for tensor in on_device]
            streams.submit(on_device[0].device.index, [], memories, name)
        return method(group, *tree_map(inner, args), **tree_map(inner, kwargs))

    return run
