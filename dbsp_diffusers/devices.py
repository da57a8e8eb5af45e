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

_SPREAD = (
    "a rank must run its model on one GPU, got transformers on {} (a device map?); load the pipeline "
    "without device_map, or call pipe.reset_device_map(), and move it to one GPU per rank"
)
_SHARED = (
    "ranks {} run their model on the same GPU; on every rank, first call "
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then move the model to that GPU: pipe.to(f"cuda:{{rank}}") '
    "with the rank on its node, or pipe.enable_model_cpu_offload(gpu_id=rank)"
)
NO_DEVICE = -1, 0
"""Result of `use_model_device` on a rank without GPU, or that has already failed."""


def use_model_device(models: Iterable[nn.Module], group: SequenceGroup) -> tuple[int, int]:
    """Makes the GPU of a rank's models current, and returns its fingerprint for `require_own_gpus`.

    Kernels and communicators use the current device, which is GPU 0 unless the process has called
    `torch.cuda.set_device`. Models on the CPU without a known GPU get LOCAL_RANK's.

    Args:
        models: A pipeline's transformers; offload hooks of accelerate and diffusers are followed to their GPU.
        group: The ranks that run the pipeline together.

    Raises:
        UserError: The transformers are on several GPUs, as with a device map.
    """
    devices = sorted({device for model in models for device in _gpus_of(model)}, key=str)
    if len(devices) > 1:
        raise UserError(_SPREAD.format(", ".join(map(str, devices))))
    device = devices[0] if devices else None
    current = _launchers_gpu() if device is None else device
    if current is not None:
        torch.cuda.set_device(current)
    return -1 if device is None else _device_fingerprint(device), int(group.over_nccl)


def require_own_gpus(group: SequenceGroup, fingerprints: Sequence[Sequence[int]]) -> None:
    """Raises UserError if ranks share a GPU under NCCL, which needs one GPU per rank; with gloo only warns.

    `fingerprints` are the results of `use_model_device` of all ranks.
    """
    indices = [index for index, _ in fingerprints]
    shared = [index for index in indices if index >= 0 and indices.count(index) > 1]
    if not shared:
        return
    ranks = [rank for rank, index in enumerate(indices) if index == shared[0]]
    message = _SHARED.format(ranks)
    if any(nccl for _, nccl in fingerprints):
        raise UserError(message)
    if group.rank == ranks[0]:
        log.warning(message)


def _gpus_of(model: nn.Module) -> set[torch.device]:
    """Returns the GPUs on which a model's weights are, or to which they are moved by offloading."""
    named: set[Any] = {parameter.device for parameter in model.parameters()}
    for part in model.modules():
        named.add(getattr(getattr(part, "_hf_hook", None), "execution_device", None))
        hooks = getattr(getattr(part, "_diffusers_hook", None), "hooks", {})
        named.add(getattr(getattr(hooks.get("group_offloading"), "group", None), "onload_device", None))
    devices = {torch.device("cuda", name) if isinstance(name, int) else torch.device(name) for name in named - {None}}
    return {device for device in devices if device.type == "cuda" and device.index is not None}


def _launchers_gpu() -> torch.device | None:
    """Returns LOCAL_RANK's GPU if torchrun started the process and GPU 0 is current, else None."""
    local = environment_number("LOCAL_RANK")
    if local is None or "RANK" not in os.environ or not torch.cuda.is_available():
        return None
    return (
        torch.device("cuda", local) if local < torch.cuda.device_count() and not torch.cuda.current_device() else None
    )


def _device_fingerprint(device: torch.device) -> int:
    """Returns a number that is equal for two ranks only if they use one GPU."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return fingerprint_of((socket.gethostname(), str(uuid), device.index))
