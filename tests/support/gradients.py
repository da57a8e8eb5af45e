"""Losses, gradients and dtypes of transformers that are trained on ranks and in one process."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dbsp_core import SequenceGroup
from dbsp_diffusers.models import architecture_of


def loss_of(predictions: Iterable[torch.Tensor], numbers: Iterable[int]) -> torch.Tensor:
    """Weighs each value at random. numbers: those of the predictions, which choose the weights"""
    total = torch.zeros((), dtype=torch.float64)
    for number, prediction in zip(numbers, predictions, strict=True):
        draws = torch.Generator().manual_seed(number)
        weights = torch.randn(prediction.shape, generator=draws, dtype=torch.float64)
        total = total + (prediction * weights.to(prediction)).mean().cpu()
    return total


def gradients_of(transformer: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def in_float64(value: Any) -> Any:
    """Returns inputs with all floating-point tensors in float64."""
    return tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, value)


def wide_floats(dtype: torch.dtype) -> Any:
    """Makes diffusers' norms and modulations, which are in float32, float64 for a model in float64."""
    return patch.object(torch.Tensor, "float", torch.Tensor.double) if dtype == torch.float64 else nullcontext()


def shard_fully(transformer: Any, mesh: DeviceMesh | None = None) -> None:
    """Puts FSDP2 on each block and on the whole. mesh: None for all ranks"""
    for part in (*architecture_of(transformer).blocks_of(transformer), transformer):
        fully_shard(part, mesh=mesh)


def summed_over_ranks(gradient: torch.Tensor) -> torch.Tensor:
    """Returns the sum over ranks, which `sum_gradients` takes by torch.distributed: rank threads have none."""
    return torch.stack(SequenceGroup.from_group().all_gather(gradient)).sum(0)
