"""Memory of attentions, counted: buffers and coarse branches are freed as soon as they are not needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dbsp_core.comm.exchange
import dbsp_core.runtime.chunk_attention
from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Plan,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
)
from dbsp_core.comm.exchange import CHUNKS_IN_FLIGHT
from dbsp_core.comm.groups import PendingTransfer
from dbsp_core.masks.block_mask import CoarseBranch
from dbsp_core.masks.grid import Video
from dbsp_core.planning import comm_dtype
from dbsp_core.runtime.session import AttentionSession
from tests.support.settings import with_debug

VSA = {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
LAYERS = 3


def branches_alive(rank: int, world: int, debug: bool) -> tuple[int, int]:
    """Returns how many gates and coarse branches were made in a pass, and how many are alive after it."""
    config = with_debug({"mask": VSA}, debug)
    session = AttentionSession(config, SequenceGroup.from_group(), Strategy(1, world), 4, LAYERS)
    made: list[weakref.ref[torch.Tensor]] = []

    def note(branch: CoarseBranch, out: torch.Tensor, add: Any = CoarseBranch.add_to) -> None:
        made.extend((weakref.ref(branch.gate), weakref.ref(branch.coarse)))
        add(branch, out)

    with mock.patch.object(CoarseBranch, "add_to", note), torch.no_grad():
        layout = session.begin(Video((4, 8, 8)), timestep=900.0)
        for layer in range(LAYERS):
            q, k, v = torch.randn(3, 1, 4, layout.shard, 16)
            gate = torch.randn_like(q)
            session.attend(layer, q, k, v, gate=gate)
            del q, k, v, gate
    gc.collect()
    return len(made), sum(one() is not None for one in made)


@pytest.mark.parametrize("debug", [False, True])
def test_gate_and_coarse_branch_are_freed(pool, debug):
    for made, alive in pool(2).run(branches_alive, debug):
        assert made == 2 * LAYERS
        assert alive == 0


class _Alive(TorchDispatchMode):
    """Most bytes of floating-point tensors that were alive at once, next to those `given` to what is watched."""

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


def peak_of_attention(plan: Plan, mask: BlockMask, layout: SequenceLayout, rank: int, head_dim: int = 64) -> float:
    """Returns one rank's peak bytes in addition to its q, k and v, in units of one of them.

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

    def copy_segments(*_: Any, **options: Any) -> None:
        pass

    alive = _Alive(q, k, v)
    with (
        mock.patch.object(SequenceGroup, "all_to_all", all_to_all),
        mock.patch.object(SequenceGroup, "start_all_to_all", start_all_to_all),
        mock.patch.object(dbsp_core.runtime.chunk_attention, "block_attention", kernel),
        mock.patch.object(dbsp_core.comm.exchange, "copy_segments", copy_segments),
        mock.patch.object(comm_dtype, "copy_segments", copy_segments),
        alive,
    ):
        attend(q, k, v)
    return alive.peak / (q.numel() * q.element_size())


WITH_CHUNKS = 2 + 2 * CHUNKS_IN_FLIGHT + 2 * (CHUNKS_IN_FLIGHT - 1)
"""Packed q and the output; k and v of each chunk in use or on its way, and of each on its way what is sent for it.
However many chunks there are: those that were used are released."""


@pytest.mark.parametrize(
    ("strategy", "tensors"),
    [
        ("U4R1", 6),  # q, k, v as they came, and packed
        ("U8R1", 6),
        ("U2R2", WITH_CHUNKS),
        ("U1R4", WITH_CHUNKS),
        ("U1R8", WITH_CHUNKS),
    ],
)
def test_peak_in_addition_to_the_inputs_is_a_constant_number_of_tensors(strategy, tensors):
    parsed = Strategy.parse(strategy)
    mask = BlockMask.dense(8, BlockGrid.uniform(parsed.world * 512, 32))
    layout = SequenceLayout.striped(mask.grid, parsed)
    plan = make_plan(mask, parsed, layout=layout)
    for rank in range(parsed.world):
        peak = peak_of_attention(plan, mask, layout, rank)
        assert tensors <= peak <= tensors + 0.1  # log-sum-exps, and a token more here than there


def test_peak_of_a_rank_with_many_rows_holds_queries_once():
    """Uses a head as dense as the other two together: the rank with those has twice as many rows."""
    bits = np.ones((3, 64, 64), dtype=bool)
    bits[1:, :, ::2] = False
    mask = BlockMask(bits, BlockGrid.uniform(2048, 32))
    layout = SequenceLayout.contiguous(2048, 2)
    plan = make_plan(mask, "U2R1", "paper", layout=layout)
    peaks = sorted(peak_of_attention(plan, mask, layout, rank) for rank in range(2))
    assert peaks[1] == 5 * 4 / 3  # not 6 · 4/3: queries lie there once
