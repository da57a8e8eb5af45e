"""Selects a rank's GPU: the one of its models, or the one of LOCAL_RANK."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import environment_number, log

NO_DEVICE = -1, 0  # result of `use_model_device` on a rank without GPU, or that has already failed


def use_model_device(models: Iterable[nn.Module], group: SequenceGroup) -> tuple[int, int]:
    """Makes the GPU of a rank's transformers current, and returns its fingerprint for `require_own_gpus`.

    Kernels and communicators use the current device, which is GPU 0 unless the process has called
    `torch.cuda.set_device`. Models on the CPU without a known GPU get LOCAL_RANK's. Raises UserError for transformers
    on several GPUs, as with a device map.
    """
    devices = sorted({device for model in models for device in _gpus_of(model)}, key=str)
    if len(devices) > 1:
        names = ", ".join(map(str, devices))
        raise UserError(
            f"a rank must run its model on one GPU, got transformers on {names} (a device map?); load the pipeline "
            "without device_map, or call pipe.reset_device_map(), and move it to one GPU per rank"
        )
    if devices:
        torch.cuda.set_device(devices[0])
        uuid = str(torch.cuda.get_device_properties(devices[0]).uuid)
        return fingerprint_of((socket.gethostname(), uuid, devices[0].index)), int(group.over_nccl)
    # Without a known GPU, LOCAL_RANK's if torchrun started the process and GPU 0 is current
    local = environment_number("LOCAL_RANK")
    is_unset = "RANK" in os.environ and torch.cuda.is_available() and not torch.cuda.current_device()
    if is_unset and local is not None and local < torch.cuda.device_count():
        torch.cuda.set_device(torch.device("cuda", local))
    return -1, int(group.over_nccl)


def require_own_gpus(group: SequenceGroup, fingerprints: Sequence[Sequence[int]]) -> None:
    """Raises UserError if ranks share a GPU under NCCL, which needs one GPU per rank; with gloo only warns.

    `fingerprints` are the results of `use_model_device` of all ranks.
    """
    indices = [index for index, _ in fingerprints]
    shared = [index for index in indices if index >= 0 and indices.count(index) > 1]
    if not shared:
        return
    ranks = [rank for rank, index in enumerate(indices) if index == shared[0]]
    message = (
        f"ranks {ranks} run their model on the same GPU; on every rank, first call "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then move the model to that GPU: '
        'pipe.to(f"cuda:{rank}") with the rank on its node, or pipe.enable_model_cpu_offload(gpu_id=rank)'
    )
    if any(nccl for _, nccl in fingerprints):
        raise UserError(message)
    if group.rank == ranks[0]:
        log.warning(message)


def _gpus_of(model: nn.Module) -> set[torch.device]:
    """Returns the GPUs of a model's weights, or to which offloading of accelerate or diffusers moves them."""
    named: set[Any] = {parameter.device for parameter in model.parameters()}
    for part in model.modules():
        named.add(getattr(getattr(part, "_hf_hook", None), "execution_device", None))
        hooks = getattr(getattr(part, "_diffusers_hook", None), "hooks", {})
        named.add(getattr(getattr(hooks.get("group_offloading"), "group", None), "onload_device", None))
    devices = {torch.device("cuda", name) if isinstance(name, int) else torch.device(name) for name in named - {None}}
    return {device for device in devices if device.type == "cuda" and device.index is not None}
