"""Counts the floating-point memory that is alive while one attention runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dbsp_core.comm.exchange
import dbsp_core.runtime.chunk_attention
from dbsp_core.comm.groups import PendingTransfer, SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.planning import wire_format
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.attention import DualBalancedAttention
from dbsp_kernels.exchange import row_words

__all__ = ["peak_of_attention"]


class _Alive(TorchDispatchMode):
    """Most bytes of floating-point tensors that were alive at once, beside those `given` to what is watched."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is not torch.Tensor:  # a wrapper has no memory of its own
                continue
            if tensor.is_floating_point():
                storage = tensor.untyped_storage()
                if storage._cdata in self._given:
                    continue
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak_of_attention(
    plan: Plan,
    mask: BlockMask,
    layout: SequenceLayout,
    rank: int,
    head_dim: int,
) -> float:
    """Peak bytes of one rank beside its q, k and v themselves, in units of one of them.

    Nothing is sent, copied or computed: gloo, and the CPU's ways to copy segments and to attend, need memory that a
    GPU's do without. What is left is what the executor allocates and holds, with what a kernel that adds to a
    partial result in place returns.
    """
    attend = DualBalancedAttention.prepare(plan, mask, layout, SequenceGroup(rank, plan.strategy.world))
    q, k, v = (torch.empty(1, plan.heads, layout.shard, head_dim) for _ in range(3))

    def all_to_all(_: SequenceGroup, sent: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> torch.Tensor:
        return sent.new_empty(sum(receive), *sent.shape[1:])

    def start_all_to_all(group: SequenceGroup, *sent_and_splits: Any) -> PendingTransfer:
        return PendingTransfer(all_to_all(group, *sent_and_splits), sent_and_splits[0], ())

    def kernel(
        q: torch.Tensor, *_: Any, partial: Any = None, out_dtype: torch.dtype = torch.float32, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if partial is not None and partial[0].dtype == out_dtype:
            return partial[0], partial[1]
        return torch.empty_like(q, dtype=out_dtype), torch.empty(q.shape[:2])

    def copy_segments(*_: Any, add: bool = False) -> None:
        pass

    def restore_rows(rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        return rows.new_empty(*rows.shape[:-1], width, dtype=dtype)

    mean = torch.zeros(1, plan.heads, head_dim)

    def empty(_: wire_format.WireFormat, like: torch.Tensor, *places: int) -> torch.Tensor:
        return like.new_empty(
            *places, row_words(like.shape[-1]), dtype=torch.float32
        )  # which counts, as int32 does not

    alive = _Alive(q, k, v, mean)
    with (
        mock.patch.object(SequenceGroup, "all_to_all", all_to_all),
        mock.patch.object(SequenceGroup, "start_all_to_all", start_all_to_all),
        mock.patch.object(dbsp_core.runtime.chunk_attention, "block_attention", kernel),
        mock.patch.object(dbsp_core.comm.exchange, "copy_segments", copy_segments),
        mock.patch.object(wire_format, "copy_segments", copy_segments),
        mock.patch.object(wire_format, "quantise_segments", copy_segments),
        mock.patch.object(wire_format, "restore_rows", restore_rows),
        mock.patch.object(wire_format.Int8Format, "empty", empty),
        mock.patch.object(dbsp_core.runtime.chunk_attention, "mean_of_tokens", return_value=mean),
        alive,
    ):
        attend(q, k, v)
    return alive.peak / (q.numel() * q.element_size())
