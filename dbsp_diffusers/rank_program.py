"""GPU and process group of a program that runs on several ranks."""

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

_PATIENCE_S = 5.0  # seconds to wait for aborting communicators after a failure


def use_local_device(local_rank: int | None = None) -> torch.device:
    """Makes the GPU of `local_rank` (default: $LOCAL_RANK, or 0) current, and returns it, or the CPU without GPUs.

    A process that sees only one GPU uses it, since launchers may show each rank only its own. Raises UserError if the
    node has fewer GPUs than ranks, on every rank if $LOCAL_WORLD_SIZE is set.
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
    """Initializes the process group over NCCL or gloo, by device, and destroys it at the end.

    NCCL gets high-priority streams (unless $TORCH_NCCL_HIGH_PRIORITY is set): the transfer of the next chunk and the
    attention kernel become ready at the same time, and a transfer that starts late stalls the next kernel. torch reads
    the variable for every communicator, including groups made from this one.

    If the body fails, communicators are aborted within `_PATIENCE_S`, because NCCL's `destroy_process_group` waits for
    ranks in a collective. `options` are further arguments of `init_process_group`. Raises CommunicationError if other
    ranks did not join.
    """
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    with explain_broken_connection():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **options)
    try:
        yield
    except BaseException:
        if dist.is_initialized() and over_nccl():  # gloo's connections close with the process
            aborting = threading.Thread(target=_abort_all_groups, daemon=True)  # since NCCL's abort can hang
            aborting.start()
            aborting.join(_PATIENCE_S)
        raise
    dist.destroy_process_group()


def _abort_all_groups() -> None:
    with suppress(Exception):  # the first error is already reported
        distributed_c10d._abort_process_group()
