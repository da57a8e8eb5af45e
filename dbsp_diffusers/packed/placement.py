"""Which sequences' tokens a rank has within a packed call, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_diffusers.packed_samples import Size

__all__ = ["Placement"]


@dataclass(frozen=True, eq=False, repr=False)
class Placement:
    """A rank's tokens of a packed call.

    Padding counts as the first sequence that the rank has tokens of, or as sequence 0 where it has none: so every rank
    computes with every parameter, and gradients are waited for by all alike.

    Attributes:
        sequence: int64[n], by place, which sequence the token there is of.
        position: int64[n], by place, which token of its sequence; 0 at padding.
        everyone: bool[ranks, sequences], which rank has tokens of which sequence.
    """

    sequence: np.ndarray
    position: np.ndarray
    everyone: np.ndarray

    @classmethod
    def of(cls, layout: SequenceLayout, grids: Sequence[Size], rank: int) -> Placement:
        """Makes the placement of sequences with these token grids."""
        tokens = [math.prod(grid) for grid in grids]
        sequences, firsts = np.repeat(np.arange(len(grids)), tokens), np.cumsum([0, *tokens])
        cells = np.bincount(layout.rank * len(grids) + sequences, minlength=layout.world * len(grids))
        everyone = cells.reshape(layout.world, -1) > 0
        everyone[~everyone.any(axis=1), 0] = True
        held, places = layout.tokens_at(rank)
        sequence = np.full(layout.shard, int(everyone[rank].argmax()))
        position = np.zeros(layout.shard, dtype=np.int64)
        sequence[places] = sequences[held]
        position[places] = held - firsts[sequences[held]]
        return cls(sequence, position, everyone)

    @cached_property
    def present(self) -> list[int]:
        """The sequences that the rank has tokens of, ascending."""
        return [int(each) for each in np.unique(self.sequence)]

    @cached_property
    def runs(self) -> list[tuple[int, int, int]]:
        """(index in `present`, first place, one past the last) of each run of one sequence's tokens, by place."""
        ids = np.searchsorted(self.present, self.sequence)
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        return [
            (int(ids[first]), int(first), int(last))
            for first, last in zip(starts, [*starts[1:], len(ids)], strict=True)
        ]

    def by_token(self, table: Callable[[int], torch.Tensor], dim: int) -> torch.Tensor:
        """One row a place, gathered from each present sequence's table, of which one is held at a time.

        Args:
            table: Gives sequence s's tensor, which has its tokens along `dim`.
        """
        parts, places = [], []
        for sequence in self.present:
            here = np.flatnonzero(self.sequence == sequence)
            whole = table(sequence)
            parts.append(whole.index_select(dim, torch.from_numpy(self.position[here]).to(whole.device)))
            places.append(here)
        order = np.argsort(np.concatenate(places))
        gathered = torch.cat(parts, dim)
        if (np.diff(order) == 1).all():
            return gathered
        return gathered.index_select(dim, torch.from_numpy(order).to(gathered.device))
