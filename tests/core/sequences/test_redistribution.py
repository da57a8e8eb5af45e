"""Redistribution of tokens: forth, back, bytes and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
import torch

from dbsp_core import Redistribution, SequenceGroup, SequenceLayout
from dbsp_core.utils.errors import UserError
from tests.support.workers import assert_all_raise


def run_redistribution(rank: int, world: int, seed: int) -> None:
    """Redistributes between two random layouts and back, and gradients, too."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 60, draws.integers(1, 6)).tolist()
    loaders = SequenceLayout.whole_sequences(lengths, draws.integers(0, world, len(lengths)).tolist(), world)
    tokens = sum(lengths)
    target = SequenceLayout.from_streams([draws.permutation(tokens)], world)
    group, exchange = SequenceGroup.from_group(), SequenceGroup.all_to_all
    redistribution = Redistribution.between(loaders, target, group, debug=bool(seed % 2))
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(tokens, 3, 5, generator=generator),
        torch.randint(-(2**60), 2**60, (tokens,), generator=generator),
        torch.randn(tokens, 2, generator=generator).bfloat16(),
        torch.rand(tokens, generator=generator) < 0.5,
        torch.randn(tokens, 1, dtype=torch.complex128, generator=generator),
        torch.randint(0, 100, (2, tokens), generator=generator, dtype=torch.int16),
    ]
    dims = (0, 0, 0, 0, 0, 1)

    def held(layout: SequenceLayout) -> list[torch.Tensor]:
        here, slots = (torch.from_numpy(a) for a in layout.tokens_at(rank))
        found = []
        for tensor, dim in zip(whole, dims, strict=True):
            shape = list(tensor.shape)
            shape[dim] = layout.shard
            found.append(tensor.new_zeros(shape).index_copy(dim, slots, tensor.index_select(dim, here)))
        return found

    sent_bytes: list[int] = []

    def counted(group: SequenceGroup, sent: torch.Tensor, receive: Sequence[int], send: Sequence[int]) -> torch.Tensor:
        sent_bytes.append(sum(one.nbytes for to, one in enumerate(sent.split(list(send))) if to != rank))
        return exchange(group, sent, receive, send)

    local = held(loaders)
    with mock.patch.object(SequenceGroup, "all_to_all", counted):
        there = redistribution.there(*local, dim=dims)
        back = redistribution.back(*there, dim=dims)
    _assert_identical(there, held(target))
    _assert_identical(back, local)
    token_bytes = sum(t.select(dim, 0).numel() * t.element_size() for t, dim in zip(whole, dims, strict=True))
    leaving = [((a.rank == rank) & (b.rank != rank)).sum() for a, b in itertools.permutations((loaders, target))]
    assert sent_bytes == list(redistribution.bytes_sent(token_bytes)) == [n * token_bytes for n in leaving]
    # Gradients take the way back, and padding has none.
    leaf = local[0].clone().requires_grad_(True)
    weights = torch.randn(target.shard, 3, 5, generator=generator)
    with mock.patch.object(SequenceGroup, "all_to_all", counted):
        arrived, labels = redistribution.there(leaf, local[1])
        (arrived * weights).sum().backward()
        _assert_identical([leaf.grad], [redistribution.back(weights)])
    assert not labels.requires_grad
    assert len(sent_bytes) == 5, "one each there and back, one of gradients, and two to compare with"


def _assert_identical(found, expected) -> None:
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def redistribute_wrongly(rank: int, world: int, fault: str, culprit: int) -> None:
    """Redistributes with other tokens, dtype, layout or checks on one rank."""
    fault = fault if rank == culprit else ""
    source = SequenceLayout.whole_sequences([9, 7] if fault == "layouts" else [7, 9], [0, 1], world)
    tokens = torch.zeros(8 if fault == "slots" else 9, 2, dtype=torch.float64 if fault == "dtype" else torch.float32)
    Redistribution.between(source, SequenceLayout.contiguous(16, world), debug=fault == "debug").there(tokens)


@pytest.mark.parametrize(("seed", "world"), [(0, 2), (1, 3), (2, 4), (3, 1), (4, 4)])
def test_round_trips_are_bitwise_and_bytes_are_counted(pool, world, seed):
    pool(world).run(run_redistribution, seed)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("slots", "dimension 0"),
        ("dtype", "differ on rank(s) [1]"),
        ("layouts", "layouts of a redistribution differ"),
        ("debug", "debug differs on rank(s) [1]"),
    ],
)
def test_difference_on_one_rank_raises_on_all(pool, fault, message):
    assert_all_raise(pool, 3, message, redistribute_wrongly, fault, 1)


def test_layouts_that_do_not_fit():
    alone, source = SequenceGroup(0, 1), SequenceLayout.whole_sequences([5, 3], [0, 0], 1)
    for message, first, tokens, world, options in (
        ("8 tokens on 1; make source and target from the same sequences", source, 9, 1, {}),
        ("on 2 ranks does not fit 8 tokens on 1", SequenceLayout.contiguous(8, 2), 8, 2, {}),
        ("has 7 slots, expected 8 to 8", source, 8, 1, {"source_slots": 7}),
        ("at least one tensor", source, 8, 1, {}),
    ):
        with pytest.raises(UserError, match=message):
            Redistribution.between(first, SequenceLayout.contiguous(tokens, world), alone, **options).there()
