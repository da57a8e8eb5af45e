"""Counting the floating-point memory that is alive while one attention runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dbsp_core.ring
import dbsp_core.route
from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, HomeLayout, SequenceGroup, Strategy, make_plan
from dbsp_core.groups import PendingShift


class Alive(TorchDispatchMode):
    """Most bytes of floating-point tensors that were alive at once, of those made while it lasts."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return result


def peak_of_an_attention(rank: int, strategy: Strategy) -> float:
    """Peak bytes beside q, k and v themselves, in units of one of them, with every rank's share alike.

    Nothing is sent, copied or computed: gloo, and the CPU's way to copy runs and to attend, have memory of their own
    that a GPU's do without. What is left is what the executor allocates and holds.
    """
    world = strategy.world
    mask = BlockMask.dense(8, BlockGrid.uniform(world * 512, 32))
    home = HomeLayout.striped(mask.grid, strategy)
    plan = make_plan(mask, strategy, home=home)
    attend = DualBalancedAttention.prepare(plan, mask, home, SequenceGroup(rank, world))
    q, k, v = (torch.zeros(1, 8, home.shard, 64) for _ in range(3))

    def all_to_all(_: SequenceGroup, sent: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> torch.Tensor:
        return sent.new_empty(sum(receive), *sent.shape[1:])

    def shift(
        _: SequenceGroup, sent: torch.Tensor, to: int, received_shape: Sequence[int], source: int
    ) -> PendingShift:
        return PendingShift(sent.new_empty(tuple(received_shape)), sent, ())

    def kernel(q: torch.Tensor, *_: Any, running: Any = None, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return running or (torch.zeros_like(q), torch.zeros(q.shape[:2]))

    def copy_runs(*_: Any) -> None:
        pass

    alive = Alive()
    with (
        mock.patch.object(SequenceGroup, "all_to_all", all_to_all),
        mock.patch.object(SequenceGroup, "shift", shift),
        mock.patch.object(dbsp_core.ring, "block_attention", kernel),
        mock.patch.object(dbsp_core.route, "copy_runs", copy_runs),
        alive,
    ):
        attend(q, k, v)
    return alive.peak / (q.numel() * q.element_size())
