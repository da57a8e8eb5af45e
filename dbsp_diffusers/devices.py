"""The GPU of a rank's models, which is made current: the one that they run on, or the one of LOCAL_RANK."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import environment_number, log

__all__ = ["use_model_device"]

_SHARED = (
    "ranks {} run their model on one and the same GPU; on every rank, first call "
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then move the model to that GPU: pipe.to(f"cuda:{{rank}}") '
    "with the rank on its node, or pipe.enable_model_cpu_offload(gpu_id=rank)"
)


def use_model_device(models: Iterable[nn.Module], group: SequenceGroup) -> None:
    """Makes the GPU current on which a rank's models run. Collective.

    Kernels are launched, and communicators made, on the current device. That is GPU 0 in every process that has not
    called `torch.cuda.set_device`. Models that are on the CPU, and whose GPU is not known yet, get LOCAL_RANK's.

    Args:
        models: A pipeline's transformers; accelerate's offloading hooks are followed to their GPU.
        group: The ranks that run the pipeline together.

    Raises:
        UserError: On all ranks, if several ranks run their model on one GPU, and NCCL connects them: it needs one GPU
            per rank. Over gloo that is allowed, with a warning.
    """
    device = next(filter(None, map(_gpu_of, models)), None)
    current = _launchers_gpu() if device is None else device
    if current is not None:
        torch.cuda.set_device(current)
    marks = [-1 if device is None else _mark_of(device), int(group.over_nccl)]
    rows = group.gather_integers(marks)
    places = [place for place, _ in rows]
    shared = [place for place in places if place >= 0 and places.count(place) > 1]
    if not shared:
        return
    ranks = [rank for rank, place in enumerate(places) if place == shared[0]]
    message = _SHARED.format(ranks)
    if any(nccl for _, nccl in rows):
        raise UserError(message)
    if group.rank == ranks[0]:
        log.warning(message)


def _gpu_of(model: nn.Module) -> torch.device | None:
    """Returns the GPU that a model's weights are on or are brought to, or None."""
    places: list[Any] = [parameter.device for parameter in model.parameters()]
    places += [getattr(getattr(part, "_hf_hook", None), "execution_device", None) for part in model.modules()]
    devices = (
        torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        for place in places
        if place is not None
    )
    return next((device for device in devices if device.type == "cuda" and device.index is not None), None)


def _launchers_gpu() -> torch.device | None:
    """Returns LOCAL_RANK's GPU in a process that torchrun started and that is still on GPU 0; else None."""
    local = environment_number("LOCAL_RANK")
    if local is None or "RANK" not in os.environ or not torch.cuda.is_available():
        return None
    return (
        torch.device("cuda", local) if local < torch.cuda.device_count() and not torch.cuda.current_device() else None
    )


def _mark_of(device: torch.device) -> int:
    """Returns a number that two ranks share only if they use one GPU."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return fingerprint_of((socket.gethostname(), str(uuid), device.index))
