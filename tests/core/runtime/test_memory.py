"""Memory of attentions, on simulated GPUs: buffers and coarse branches are freed as soon as they are not needed."""

from __future__ import annotations

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, DualBalancedAttention, Plan, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange import CHUNKS_IN_FLIGHT
from dbsp_core.masks.branches import CoarseBranch
from dbsp_core.masks.grid import Video
from tests.support.settings import session_of, with_debug

VSA = {"source": "vsa", "sparsity": 0.5, "tile": [2, 2, 4], "block_q": 16, "block_k": 16}
LAYERS = 3


def branches_alive(rank: int, world: int, debug: bool) -> tuple[int, int]:
    """Returns how many gates and coarse branches were made in a pass, and how many are alive after it."""
    session = session_of(with_debug({"mask": VSA}, debug), f"U1R{world}", 4, LAYERS)
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


def peak_of_attention(
    rank: int, world: int, plan: Plan, mask: BlockMask, layout: SequenceLayout, head_dim: int = 64
) -> float:
    """Returns a rank's peak bytes in addition to its q, k and v, in units of one of them."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    attend = DualBalancedAttention.prepare(plan, mask, layout, None, device=device)
    q, k, v = (torch.zeros(1, plan.heads, layout.shard, head_dim, device=device) for _ in range(3))
    gc.collect()  # what other tests left on the device must not be freed meanwhile
    attend(q, k, v)  # waits for the ranks that are still collecting: to others, collecting did nothing
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    attend(q, k, v)
    return (torch.cuda.max_memory_allocated(device) - before) / q.nbytes


WITH_CHUNKS = 2 + 2 * CHUNKS_IN_FLIGHT + 2 * (CHUNKS_IN_FLIGHT - 1)
"""Packed q and the output; k and v of each chunk in use or on its way, and of each on its way what is sent for it.
However many chunks there are: those that were used are released."""


@pytest.mark.parametrize(("strategy", "tensors"), [("U4R1", 6), ("U2R2", WITH_CHUNKS)])
def test_peak_in_addition_to_the_inputs_is_a_constant_number_of_tensors(gpu_node, strategy, tensors):
    """Expects q, k and v as they came, and packed, unless there is a ring."""
    mask = BlockMask.dense(4, BlockGrid.uniform(256, 32))
    layout = SequenceLayout.striped(mask.grid, Strategy.parse(strategy))
    for peak in gpu_node.run(4, peak_of_attention, make_plan(mask, strategy, layout=layout), mask, layout):
        assert tensors <= peak <= tensors + 0.1  # log-sum-exps
