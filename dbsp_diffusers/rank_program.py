"""The GPU and process group of a program that runs as one of several ranks: joined, left, aborted after a failure."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dbsp_core.comm.groups import explain_broken_connection
from dbsp_core.comm.process_groups import over_nccl
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import environment_number

_PATIENCE_S = 5.0
"""Seconds for aborting; a program that failed ends after them in any case."""


def use_local_device(local_rank: int | None = None) -> torch.device:
    """Makes this process's GPU the current one, for a program that runs as one of several ranks.

    Args:
        local_rank: Rank on this node. Default: $LOCAL_RANK, or 0. A process that sees one GPU takes that one, as
            launchers may show each rank only its own.

    Returns:
        The GPU, or the CPU if there is no GPU.

    Raises:
        UserError: The node has fewer GPUs than ranks. Every rank raises it if $LOCAL_WORLD_SIZE is set.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    index, last = local_rank, local_rank or 0
    if index is None:
        index = environment_number("LOCAL_RANK") or 0
        last = max(index, (environment_number("LOCAL_WORLD_SIZE") or 1) - 1)
    if 1 < gpus <= last:
        raise UserError(f"local rank {last} has no GPU: this node has {gpus}; start one process per GPU")
    device = torch.device("cuda", index if gpus > 1 else 0)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(device: torch.device, **options: Any) -> Iterator[None]:
    """Joins the other ranks, over NCCL or gloo as the device asks for, and leaves them at the end.

    NCCL gets streams of high priority, unless $TORCH_NCCL_HIGH_PRIORITY says otherwise: the transfer of the next chunk
    and the attention kernel become ready at the same time, and a transfer that starts late is waited for. torch reads
    the variable for every communicator that it makes, so that it holds for groups that others make from this one too.

    After a failure inside, the communicators are aborted: NCCL's `destroy_process_group` waits for ranks that are
    still in a collective with this one.

    Args:
        device: This rank's, as `use_local_device` returns it.
        options: Further arguments of `init_process_group`.

    Raises:
        CommunicationError: Other ranks did not come.
    """
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    with explain_broken_connection():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    try:
        yield
    except BaseException:
        _abort()
        raise
    dist.destroy_process_group()


def _abort() -> None:
    """Ends this rank's communicators, without waiting for other ranks or longer than `_PATIENCE_S`.

    Only NCCL has to be aborted. Connections of gloo are closed with the process.
    """
    if dist.is_initialized() and over_nccl():
        # In a thread: NCCL's abort can hang, too.
        aborting = threading.Thread(target=_abort_all_groups, daemon=True)
        aborting.start()
        aborting.join(_PATIENCE_S)


def _abort_all_groups() -> None:
    with suppress(Exception):  # the first error is reported already
        distributed_c10d._abort_process_group()
