"""Queries that every rank has, attending to keys that ranks share: as in one process, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import gather_shards
from dbsp_core.runtime import whole_tensors
from dbsp_core.runtime.whole_tensors import attend_shared_keys, count_gradient_once

KEYS = {2: (0, 7), 3: (5, 1, 30), 4: (9, 0, 0, 2)}
"""Numbers of keys of each rank, by the number of ranks."""
SCALE = 0.3


def tensors(world: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Returns q [2, 3, 11, 8], k and v of all ranks, and weights of a loss."""
    draws = torch.Generator().manual_seed(world)
    shapes = ((11,), (sum(KEYS[world]),), (sum(KEYS[world]),), (11,))
    return [torch.randn(2, 3, *shape, 8, generator=draws, dtype=dtype) for shape in shapes]


def expected(world: int) -> list[torch.Tensor]:
    """Returns the output, and the gradients of q, k and v."""
    *leaves, weights = tensors(world)
    for leaf in leaves:
        leaf.requires_grad_(True)
    out = scaled_dot_product_attention(*leaves, scale=SCALE)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def attend(rank: int, world: int, merged: bool = True) -> list[torch.Tensor]:
    """Returns the output, this rank's part of q's gradient, and the gradients of its own k and v."""
    q, k, v, weights = tensors(world)
    k, v = (whole.split(KEYS[world], dim=2)[rank] for whole in (k, v))
    leaves = [t.clone().requires_grad_(True) for t in (q, k, v)]
    group = SequenceGroup.from_group()
    out = attend_shared_keys(*leaves, SCALE, group if merged else SequenceGroup(0, 1))
    (count_gradient_once(out, group) * weights).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize(("world", "block"), [(2, 64), (3, 4), (4, 4)])
def test_equals_one_process_with_its_gradients(threads, monkeypatch, world, block):
    monkeypatch.setattr(whole_tensors, "BLOCK", block)
    found, (out, dq, dk, dv) = threads(world).run(attend), expected(world)
    assert all(torch.equal(one[0], found[0][0]) for one in found), "identical bits on every rank"
    assert (found[0][0] - out).abs().max() < 1e-14
    assert (sum(one[1] for one in found) - dq).abs().max() < 1e-14
    assert (torch.cat([one[2] for one in found], dim=2) - dk).abs().max() < 1e-14
    assert (torch.cat([one[3] for one in found], dim=2) - dv).abs().max() < 1e-14


def test_rank_without_the_others_keys_is_wrong(threads):
    found = threads(3).run(attend, False)
    assert min((one[0] - expected(3)[0]).abs().max() for one in found) > 1e-2


def gradient_of_gathered(rank: int, world: int) -> list[list[float]]:
    """Returns the gradient of this rank's shard, where the loss is Σ index · value over the gathered tensor."""
    shard = torch.ones(1, 2, 1, requires_grad=True)
    gathered = gather_shards(shard, 1, SequenceGroup.from_group())
    (gathered.flatten() * torch.arange(2 * world)).sum().backward()
    assert shard.grad is not None
    return shard.grad.flatten().tolist()


def test_gathered_gradient_is_that_of_the_ranks_shard(threads):
    assert threads(3).run(gradient_of_gathered) == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
