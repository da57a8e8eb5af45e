"""Which sequences' tokens a rank has within a packed call, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.layout.sequence_layout import Streams
from dbsp_diffusers.bags import Sharing
from dbsp_kernels.exchange import to_device

__all__ = ["Placement"]


@dataclass(frozen=True, eq=False, repr=False)
class Placement:
    """A rank's tokens of a packed call.

    Padding counts as the first sequence that the rank has tokens of, or as sequence 0 where it has none: so every rank
    computes with every parameter, and gradients are waited for by all alike.

    Attributes:
        sequence: int64[n], by place, which sequence the token there is of.
        position: int64[n], by place, which token of its sequence, text first; 0 at padding.
        everyone: bool[ranks, sequences], which rank has tokens of which sequence.
        text, video: The places of each stream; without text in the sequence all are of video.
    """

    sequence: np.ndarray
    position: np.ndarray
    everyone: np.ndarray
    text: slice
    video: slice

    @classmethod
    def of(cls, sharing: Sharing, tokens: Sequence[int], streams: Streams = None) -> Placement:
        """Makes this rank's placement.

        Args:
            sharing: Where tokens are.
            tokens: Of each sequence, text included.
            streams: The place of text on a rank.
        """
        layout, rank, count = sharing.layout, sharing.group.rank, len(tokens)
        sequences, firsts = np.repeat(np.arange(count), tokens), np.cumsum([0, *tokens])
        cells = np.bincount(layout.rank * count + sequences, minlength=layout.world * count)
        everyone = cells.reshape(layout.world, -1) > 0
        everyone[~everyone.any(axis=1), 0] = True
        held, places = layout.tokens_at(rank)
        sequence = np.full(sharing.places, int(everyone[rank].argmax()))
        position = np.zeros(sharing.places, dtype=np.int64)
        sequence[places] = sequences[held]
        position[places] = held - firsts[sequences[held]]
        first, other = slice(0, sharing.first_stream), slice(sharing.first_stream, sharing.places)
        text, video = (other, first) if streams == "last" else (first, other)
        return cls(sequence, position, everyone, text, video)

    @cached_property
    def present(self) -> list[int]:
        """The sequences that the rank has tokens of, ascending."""
        return [int(each) for each in np.unique(self.sequence)]

    def runs(self, places: slice = slice(None)) -> list[tuple[int, int, int]]:
        """(index in `present`, first place, one past the last) of each run of one sequence's tokens, by place.

        Args:
            places: Counted from the first of these.
        """
        ids = np.searchsorted(self.present, self.sequence[places])
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        return [
            (int(ids[first]), int(first), int(last))
            for first, last in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]

    def joined(self, text: torch.Tensor, video: torch.Tensor, dim: int) -> torch.Tensor:
        """The two streams' tensors in the order of their places."""
        return torch.cat([text, video] if self.text.stop == self.video.start else [video, text], dim)

    def by_token(self, table: Callable[[int], torch.Tensor], dim: int, places: slice = slice(None)) -> torch.Tensor:
        """One row a place, gathered from each present sequence's table, of which one is held at a time.

        Without places too the result depends on every table.

        Args:
            table: Gives sequence s's tensor, which has its tokens along `dim`.
            places: Those that are wanted.
        """
        sequence, position = self.sequence[places], self.position[places]
        parts, order = [], []
        for one in self.present:
            here = np.flatnonzero(sequence == one)
            whole = table(one)
            parts.append(whole.index_select(dim, to_device(position[here], whole.device)))
            order.append(here)
        places_of_rows = np.concatenate(order)
        gathered = torch.cat(parts, dim)
        if (np.diff(places_of_rows) == 1).all():
            return gathered
        return gathered.index_select(dim, to_device(np.argsort(places_of_rows), gathered.device))
