"""sp_shard and sp_gather on gloo processes: any lengths, dims, dtypes and layouts, with gradients; mistakes on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dbsp_core import BlockGrid, SequenceLayout, Strategy, sp_gather, sp_shard
from tests.support.workers import assert_all_raise

TOKENS = 23


def layout_of(name: str, world: int) -> SequenceLayout | None:
    """Returns a layout of `TOKENS` tokens, of which ranks have unequal numbers."""
    grid = BlockGrid(TOKENS, 5, 4, 4)
    if name == "whole sequences":  # rank 0 may have none
        return SequenceLayout.whole_sequences([9, 3, 11], [world - 1, world // 2, world - 1], world)
    if name == "two streams":  # padding between text and video, too
        return SequenceLayout.named("striped", grid, Strategy(1, world), streams="first")
    return None if name == "none" else SequenceLayout.named(name, grid, Strategy(1, world))


def round_trip(rank: int, world: int, name: str, dim: int, trim: bool) -> dict[str, Any]:
    """Shards, multiplies, and gathers. Returns the result, its gradient summed over ranks, and this rank's length."""
    shape = [2, 3, 4]
    shape.insert(dim if dim >= 0 else len(shape) + 1 + dim, TOKENS)
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    layout = layout_of(name, world)
    shard = sp_shard(whole, dim, layout=layout)
    length = shard.shape[dim]
    if trim and layout is not None:  # without the padding at the end
        length = int(layout.local[layout.rank == rank].max(initial=-1)) + 1
        shard = shard.narrow(dim, 0, length)
    gathered = sp_gather(shard * (2 + rank), dim, layout=layout)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (gathered * weight).sum().backward()
    dist.all_reduce(whole.grad)
    owner = torch.arange(TOKENS) // -(-TOKENS // world) if layout is None else torch.from_numpy(layout.rank)
    factor = (2 + owner).view([TOKENS if size == TOKENS else 1 for size in shape])
    numbers = torch.arange(TOKENS, dtype=torch.int64)
    flags = sp_gather(sp_shard(numbers % 3 == 0, 0, layout=layout), 0, layout=layout)
    return {
        "out": torch.equal(gathered.detach(), whole.detach() * factor),
        "gradient": torch.allclose(whole.grad, weight * factor, atol=1e-6),
        "integers": torch.equal(sp_gather(sp_shard(numbers, -1, layout=layout), 0, layout=layout), numbers),
        "flags": torch.equal(flags, numbers % 3 == 0),
        "length": length,
    }


@pytest.mark.parametrize(
    ("world", "name", "dim", "trim"),
    [
        (3, "none", 1, False),
        (2, "contiguous", -1, True),
        (1, "striped", 0, False),
        (4, "two streams", -2, False),
        (4, "whole sequences", 2, True),
    ],
)
def test_gathered_shards_are_the_tensor_and_gradients_its_parts(pool, world, name, dim, trim):
    results = pool(world).run(round_trip, name, dim, trim)
    lengths = [found.pop("length") for found in results]
    assert results == [dict.fromkeys(("out", "gradient", "integers", "flags"), True)] * world
    if world > 1 and name in ("none", "whole sequences"):
        assert len(set(lengths)) > 1, "shards must be uneven"


def gather_a_mistake(rank: int, world: int, mistake: str) -> None:
    """Calls one of both with another argument on rank 1."""
    odd = rank == 1
    layout = layout_of("contiguous", world + (odd and mistake == "ranks"))
    shard = torch.zeros(2, layout.shard, dtype=torch.float64 if odd and mistake == "dtype" else torch.float32)
    if odd and mistake == "slots":
        shard = shard[:, :2]
    if odd and mistake == "sizes":
        shard = shard[:1]
    if odd and mistake == "layout":
        layout = layout_of("striped", world)
    sp_gather(shard, 7 if odd and mistake == "dim" else 1, layout=layout)


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("ranks", "rank(s) [1]: expected a layout for 3 ranks, got 4; make it for the group"),
        ("dtype", "differ on rank(s) [1] in number, dtype"),
        ("sizes", "differ on rank(s) [1] in number, dtype"),
        ("slots", "rank(s) [1]: rank 1 has 2 slots, expected 8 to 8"),
        ("layout", "the layouts of a redistribution differ on rank(s) [1]"),
        ("dim", "rank(s) [1]: tensor of shape (2, 8) has no dimension 7"),
    ],
)
def test_mistake_on_one_rank_raises_on_all(pool, mistake, message):
    assert_all_raise(pool, 3, message, gather_a_mistake, mistake)


def test_shard_of_another_size_is_rejected():
    with pytest.raises(ValueError, match="expected 23 tokens on 1 ranks as in the layout, got 24 in dim 0 on 1 ranks"):
        sp_shard(torch.zeros(24), 0, layout=SequenceLayout.contiguous(23, 1))
