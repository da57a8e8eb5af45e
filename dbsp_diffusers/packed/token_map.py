"""Slots of a packed call's tokens, and their exchange between loaders and owners."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import torch
import torch.nn.functional as F

from dbsp_core.comm.groups import SequenceGroup, gather_shards
from dbsp_core.comm.redistribution import Redistribution
from dbsp_core.layout.sequence_layout import SequenceLayout, Streams
from dbsp_diffusers.packed.bags import is_text
from dbsp_diffusers.packed.samples import Condition, PackedBatch, Sharing
from dbsp_kernels.segments import to_device


@dataclass(frozen=True, eq=False, repr=False)
class TokenMap:
    """A rank's tokens of a packed call.

    Padding belongs to the rank's first sequence, or to sequence 0 if it has none, so that every rank uses every
    parameter and takes part in gradient synchronization.
    """

    sequence: np.ndarray  # int64[n], sequence of each slot's token
    position: np.ndarray  # int64[n], index of each slot's token in its sequence, text first; 0 at padding
    owners: np.ndarray  # bool[ranks, sequences], True if the rank has tokens of the sequence
    text: slice  # slots of text; empty if text is not in the sequence
    video: slice  # slots of video

    @classmethod
    def from_sharing(cls, sharing: Sharing, tokens: Sequence[int], streams: Streams = None) -> TokenMap:
        """Makes this rank's map; `tokens` counts each sequence's tokens, text included."""
        layout, rank, count = sharing.layout, sharing.group.rank, len(tokens)
        sequences, firsts = np.repeat(np.arange(count), tokens), np.cumsum([0, *tokens])
        cells = np.bincount(layout.rank * count + sequences, minlength=layout.world * count)
        owners = cells.reshape(layout.world, -1) > 0
        owners[~owners.any(axis=1), 0] = True
        held, slots = layout.tokens_at(rank)
        sequence = np.full(sharing.slots, int(owners[rank].argmax()))
        position = np.zeros(sharing.slots, dtype=np.int64)
        sequence[slots] = sequences[held]
        position[slots] = held - firsts[sequences[held]]
        first, other = slice(0, sharing.first_stream), slice(sharing.first_stream, sharing.slots)
        text, video = (other, first) if streams == "last" else (first, other)
        return cls(sequence, position, owners, text, video)

    @cached_property
    def present(self) -> list[int]:
        """The sequences with tokens on this rank, ascending."""
        return [int(each) for each in np.unique(self.sequence)]

    def runs(self) -> list[tuple[int, int, int]]:
        """Returns (index in `present`, first slot, end slot) of each run of one sequence's tokens."""
        ids = np.searchsorted(self.present, self.sequence)
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        ends = [*starts[1:], len(ids)]
        return [(int(ids[first]), int(first), int(last)) for first, last in zip(starts, ends, strict=True)]

    def joined(self, text: torch.Tensor, video: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenates the streams' tensors in slot order."""
        return torch.cat([text, video] if self.text.stop == self.video.start else [video, text], dim)

    def by_token(self, table: Callable[[int], torch.Tensor], dim: int, slots: slice = slice(None)) -> torch.Tensor:
        """Gathers a row per slot from the present sequences' tables, holding one table at a time.

        `table` returns a sequence's tensor, with tokens along `dim`. The result depends on every table, even without
        slots.
        """
        sequence, position = self.sequence[slots], self.position[slots]
        parts, order = [], []
        for present_sequence in self.present:
            here = np.flatnonzero(sequence == present_sequence)
            whole = table(present_sequence)
            parts.append(whole.index_select(dim, to_device(position[here], whole.device)))
            order.append(here)
        slots_of_rows = np.concatenate(order)
        gathered = torch.cat(parts, dim)
        if (np.diff(slots_of_rows) == 1).all():
            return gathered
        return gathered.index_select(dim, to_device(np.argsort(slots_of_rows), gathered.device))


Move = Callable[[torch.Tensor], torch.Tensor]
"""Moves tokens [1, n, C] from one layout to another. Collective, differentiable."""


@dataclass(frozen=True, eq=False, repr=False)
class SampleExchange:
    """Moves tokens between this rank's samples and its slots.

    Text is not moved: every rank with tokens of a sequence embeds its prompt.
    """

    sequences: Sequence[int]  # sequences of this rank's samples, in order
    conditions: Mapping[int, Condition]  # conditions of sequences with tokens on this rank
    take: Move  # moves video tokens of this rank's samples to slots
    gather: Move  # moves video tokens back to the samples


def sample_exchange(batch: PackedBatch, sharing: Sharing, here: TokenMap) -> SampleExchange:
    """Builds the exchange of one packed pass for this rank's tokens `here`. Collective if samples differ by rank."""
    grids = [video.grid_tokens for video in batch.videos]
    layout, group = _layout_of_grids(sharing.layout, is_text(batch.videos)), sharing.group
    slots = here.video.stop - here.video.start
    if batch.loaders is None:
        conditions = {int(each): batch.samples[each].condition for each in np.flatnonzero(here.owners[group.rank])}
        take, gather = _of_all(layout, group, slots, batch.device)
        return SampleExchange(range(len(grids)), conditions, take, gather)
    source = SequenceLayout.whole_sequences(grids, batch.loaders, group.size)
    mine = [sequence for sequence, loader in enumerate(batch.loaders) if loader == group.rank]
    held = sum(grids[sequence] for sequence in mine)
    redistribution = Redistribution.between(
        source, layout, group, source_slots=held, target_slots=slots, debug=batch.debug
    )
    conditions = _exchanged_conditions(batch, mine, group, here.owners)
    return SampleExchange(mine, conditions, partial(redistribution.there, dim=1), partial(redistribution.back, dim=1))


def _layout_of_grids(layout: SequenceLayout, text: np.ndarray) -> SequenceLayout:
    """Returns the layout without text; slots are relative to each rank's first video slot."""
    if not text.any():
        return layout
    rank, local = layout.rank[~text], layout.local[~text]
    first = np.full(layout.world, layout.shard)
    np.minimum.at(first, rank, local)
    return replace(layout, rank=rank, local=local - first[rank])


def _of_all(layout: SequenceLayout, group: SequenceGroup, slots: int, device: torch.device) -> tuple[Move, Move]:
    """Returns moves from replicated tokens to this rank's, and back (collective)."""
    held, at = (to_device(each, device) for each in layout.tokens_at(group.rank))
    most = int(layout.local.max()) + 1
    slot = to_device(layout.rank * most + layout.local, device)

    def take(x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(x.shape[0], slots, x.shape[2]).index_copy(1, at, x.index_select(1, held))

    def gather(x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, :most]  # drop padding
        whole = F.pad(tokens, (0, 0, 0, most - tokens.shape[1]))
        return gather_shards(whole, 1, group).index_select(1, slot)

    return take, gather


def _exchanged_conditions(
    batch: PackedBatch, mine: Sequence[int], group: SequenceGroup, present: np.ndarray
) -> dict[int, Condition]:
    """Sends conditions from loaders to the ranks with tokens of the sequence, in one all-to-all without gradients.

    `mine` are the sequences of this rank's samples; `present` is bool[ranks, sequences], see `TokenMap.owners`.
    """
    # 1. Send each sequence's tensors as bytes to the ranks with its tokens
    of_own = {sequence: vars(sample.condition) for sequence, sample in zip(mine, batch.samples, strict=True)}
    sent = [[sequence for sequence in mine if present[rank, sequence]] for rank in range(group.size)]
    received: list[list[int]] = [[] for _ in range(group.size)]
    for sequence, loader in enumerate(batch.loaders or ()):
        if present[group.rank, sequence]:
            received[loader].append(sequence)
    payload = [
        value.detach().contiguous().view(torch.uint8).flatten()
        for sequences in sent
        for sequence in sequences
        for value in of_own[sequence].values()
        if value is not None
    ]
    sizes = [[math.prod(shape) * dtype.itemsize for shape, dtype in kinds.values()] for kinds in batch.kinds]
    received_bytes, sent_bytes = (
        [sum(sum(sizes[sequence]) for sequence in sequences) for sequences in way] for way in (received, sent)
    )
    together = torch.cat([torch.empty(0, dtype=torch.uint8, device=batch.device), *payload])
    came = group.all_to_all(together, received_bytes, sent_bytes)
    # 2. Restore tensors on their own storage
    sequences = [sequence for of_rank in received for sequence in of_rank]
    conditions = {}
    for sequence, of_sequence in zip(sequences, came.split([sum(sizes[each]) for each in sequences]), strict=True):
        kinds, parts = batch.kinds[sequence], of_sequence.split(sizes[sequence])
        conditions[sequence] = Condition(
            **{
                name: part.clone().view(dtype).view(shape)
                for (name, (shape, dtype)), part in zip(kinds.items(), parts, strict=True)
            }
        )
    return conditions
