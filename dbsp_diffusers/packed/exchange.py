"""Moves samples between the ranks that are given them and the layout in which blocks compute on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.comm.rehoming import Rehoming
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_diffusers.packed_samples import Condition, PackedBatch, Size
from dbsp_diffusers.sharding.stream_shards import StreamShards

__all__ = ["Exchange", "exchange_of"]

Move = Callable[[torch.Tensor], torch.Tensor]
"""Moves tokens [1, n, C] from one layout to another. Collective, differentiable."""


@dataclass(frozen=True, eq=False, repr=False)
class Exchange:
    """Moves between this rank's samples and the tokens that it computes on.

    Attributes:
        own: The sequences of this rank's samples, in their order.
        given: Timesteps and prompt of each sequence that has tokens here.
        take: Moves this rank's samples to the layout.
        gather: Moves tokens back to the samples.
    """

    own: Sequence[int]
    given: Mapping[int, Condition]
    take: Move
    gather: Move


def exchange_of(
    batch: PackedBatch,
    grids: Sequence[Size],
    layout: SequenceLayout,
    group: SequenceGroup,
    present: np.ndarray,
    config: Any,
    debug: bool,
) -> Exchange:
    """The exchange of one packed pass. Collective where ranks are given samples of their own.

    Args:
        present: bool[ranks, sequences], which rank has tokens of which sequence.
        config: The configuration of the transformer.
        debug: Whether all ranks compare what they exchange before every exchange.
    """
    if batch.loaders is None:
        shards = StreamShards(layout, group, 0, layout.tokens, batch.device)
        given = {int(each): batch.samples[each].condition for each in np.flatnonzero(present[group.rank])}
        return Exchange(range(len(grids)), given, partial(shards.take, dim=1), partial(shards.gather, dim=1))
    tokens = [math.prod(grid) for grid in grids]
    source = SequenceLayout.whole_sequences(tokens, batch.loaders, group.size)
    own = [sequence for sequence, loader in enumerate(batch.loaders) if loader == group.rank]
    held = sum(tokens[sequence] for sequence in own)
    rehoming = Rehoming.of(source, layout, group, source_places=held, debug=debug)
    given = _exchanged_conditions(batch, own, group, present, config)
    return Exchange(own, given, partial(rehoming.there, dim=1), partial(rehoming.back, dim=1))


def _exchanged_conditions(
    batch: PackedBatch, own: Sequence[int], group: SequenceGroup, present: np.ndarray, config: Any
) -> dict[int, Condition]:
    """Timesteps and prompts, sent by the ranks that are given them to those that have tokens of the sequence.

    One all-to-all of bytes: text, image, timesteps in float64. Nothing in it has gradients.
    """
    widths = config.text_dim, config.image_dim or 0
    types = batch.text_type, batch.text_type, torch.float64
    sizes = [
        [length * width * kind.itemsize for length, width, kind in zip(lengths, (*widths, 1), types, strict=True)]
        for lengths in batch.lengths
    ]
    of_own = dict(zip(own, batch.samples, strict=True))
    sent = [[each for each in own if present[rank, each]] for rank in range(group.size)]
    received = [
        [each for each, loader in enumerate(batch.loaders or ()) if loader == rank and present[group.rank, each]]
        for rank in range(group.size)
    ]
    payload = [_as_bytes(of_own[each].condition) for those in sent for each in those]
    together = torch.cat([torch.empty(0, dtype=torch.uint8, device=batch.device), *payload])
    received_bytes, sent_bytes = (
        [sum(sum(sizes[each]) for each in those) for those in way] for way in (received, sent)
    )
    came = group.all_to_all(together, received_bytes, sent_bytes)
    sequences = [each for those in received for each in those]
    found = {}
    for sequence, own_bytes in zip(sequences, came.split([sum(sizes[each]) for each in sequences]), strict=True):
        text, image, times = (
            part.clone().view(kind) for part, kind in zip(own_bytes.split(sizes[sequence]), types, strict=True)
        )
        embedded = image.view(-1, widths[1]) if widths[1] else None
        found[sequence] = Condition(times, text.view(-1, widths[0]), embedded)
    return found


def _as_bytes(condition: Condition) -> torch.Tensor:
    parts = [condition.text, *([] if condition.image is None else [condition.image]), condition.timesteps.double()]
    return torch.cat([part.detach().contiguous().view(torch.uint8).flatten() for part in parts])
