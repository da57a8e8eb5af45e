"""The tokens of each sequence that each rank holds once bags are chosen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.sequences.bags import BagTopology

__all__ = ["TokenRuns", "staying"]


@dataclass(frozen=True, eq=False, repr=False)
class TokenRuns:
    """Runs of tokens, each of one sequence and on one rank; together they hold every token once. All int64[runs].

    Runs are sorted by rank, and on a rank by sequence and start: the order of its tokens.

    Attributes:
        start: Place of the first token in its sequence.
        length: Number of tokens, at least 1.
    """

    sequence: np.ndarray
    start: np.ndarray
    length: np.ndarray
    rank: np.ndarray

    @classmethod
    def sorted(cls, sequence: np.ndarray, start: np.ndarray, length: np.ndarray, rank: np.ndarray) -> TokenRuns:
        """Sorts runs that come in any order, and leaves out empty ones."""
        some = np.flatnonzero(length)
        some = some[np.lexsort((start[some], sequence[some], rank[some]))]
        return cls(sequence[some], start[some], length[some], rank[some])

    def by_rank(self, world: int) -> np.ndarray:
        """int64[world]: tokens of each rank."""
        return _summed(self.rank, self.length, world)

    def moved(self, loader: np.ndarray, node_size: int) -> tuple[int, int]:
        """Numbers of tokens that another rank has loaded, and of those from another node; `loader` is by sequence."""
        source = loader[self.sequence]
        apart = source // node_size != self.rank // node_size
        return int(self.length[source != self.rank].sum()), int(self.length[apart].sum())

    def within(self, sequences: np.ndarray, first_rank: int) -> TokenRuns:
        """The runs of some sequences, int64[s] and rising, numbered anew from 0, as are ranks from `first_rank` on."""
        own = np.flatnonzero(np.isin(self.sequence, sequences))
        number = np.searchsorted(sequences, self.sequence[own])
        return TokenRuns(number, self.start[own], self.length[own], self.rank[own] - first_rank)

    def token_homes(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rank of each token and its place there, int64[Σ tokens] each; sequences of `tokens` follow one another."""
        first = np.cumsum(tokens) - tokens
        place = np.cumsum(self.length) - self.length
        rank_first = np.searchsorted(self.rank, self.rank)  # the first run of each run's rank
        within = np.arange(int(self.length.sum())) - np.repeat(place, self.length)
        token = np.repeat(first[self.sequence] + self.start, self.length) + within
        rank, local = np.empty_like(token), np.empty_like(token)
        rank[token] = np.repeat(self.rank, self.length)
        local[token] = np.repeat(place - place[rank_first], self.length) + within
        return rank, local


def staying(tokens: np.ndarray, bag: np.ndarray, loader: np.ndarray, topology: BagTopology) -> TokenRuns:
    """Cuts so that every rank of a bag holds as many tokens, up to one, and keeps as many that it loaded as it can.

    No layout that is as even moves fewer tokens. All arrays are int64[n].
    """
    # 1. Quotas.
    total, bags = _summed(bag, tokens, len(topology.ranks)), topology.bag_of_rank
    place = np.arange(topology.world) - topology.first_rank[bags]
    quota = total[bags] // topology.ranks[bags] + (place < total[bags] % topology.ranks[bags])
    # 2. Of what a rank loaded and its bag has, the first tokens stay, up to the quota.
    home = np.flatnonzero(topology.bag_of_rank[loader] == bag)
    home = home[np.argsort(loader[home], kind="stable")]
    running = np.cumsum(tokens[home]) - tokens[home]
    running -= running[np.searchsorted(loader[home], loader[home])]
    kept = np.zeros_like(tokens)
    kept[home] = np.clip(quota[loader[home]] - running, 0, tokens[home])
    # 3. All others, bag by bag, fill the ranks that have places left, in order.
    order = np.argsort(bag, kind="stable")
    pool, free = (tokens - kept)[order], quota - _summed(loader, kept, topology.world)
    ends = np.cumsum(pool), np.cumsum(free)
    cuts = np.unique(np.concatenate([[0], *ends]))
    begin, length = cuts[:-1], np.diff(cuts)
    piece, rank = (np.searchsorted(end, begin, side="right") for end in ends)
    taken = order[piece]
    start = kept[taken] + begin - (ends[0] - pool)[piece]
    everything = np.arange(len(tokens))
    return TokenRuns.sorted(
        np.concatenate([everything, taken]),
        np.concatenate([np.zeros_like(tokens), start]),
        np.concatenate([kept, length]),
        np.concatenate([loader, rank]),
    )


def _summed(index: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """int64[size]: values added up by index."""
    total = np.zeros(size, dtype=np.int64)
    np.add.at(total, index, values)
    return total
