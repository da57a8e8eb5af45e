"""Training with a sharded sequence: sums gradients over the ranks of the sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.attached import attached_to
from dbsp_diffusers.models.transformers import transformers_in

BUCKET_BYTES = 64 << 20


def sum_gradients(model: Any) -> None:
    """Sums the gradients of a transformer's parameters over the ranks of the sequence. Collective.

    Every rank computes the whole loss, but gradients from its own tokens only. Call this after `backward` and before
    clipping or the optimizer's step. With data parallelism, average over the data group as usual, before or after.
    FSDP2 over the sequence's ranks has already averaged its parameters' gradients; they are scaled back to the sum.

    Args:
        model: A pipeline or transformer with db-SP enabled.

    Raises:
        UserError: db-SP is not enabled.
    """
    state = attached_to(model)
    if state is None:
        raise UserError("sum_gradients needs a model with db-SP enabled; call dbsp_diffusers.enable first")
    group = state.first.group
    if group.size == 1 or group.alone:
        return
    ranks = set(dist.get_process_group_ranks(group.group))
    # two transformers may share parameters
    parameters = dict.fromkeys(p for part in transformers_in(model).values() for p in part.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    summed = []
    for grad in grads:
        if not isinstance(grad, DTensor):
            summed.append(grad)
        elif ranks <= set(grad.device_mesh.mesh.flatten().tolist()):
            grad.to_local().mul_(group.size)
        else:
            summed.append(grad.to_local())
    for bucket in _buckets(summed):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group.group)
        for grad, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(total)


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups gradients by dtype and device into buckets of BUCKET_BYTES, identically on all ranks."""
    waiting: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        bucket = waiting.setdefault((grad.dtype, grad.device), [])
        bucket.append(grad)
        if sum(gradient.nbytes for gradient in bucket) >= BUCKET_BYTES:
            yield waiting.pop((grad.dtype, grad.device))
    yield from waiting.values()
