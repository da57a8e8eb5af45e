"""Plans several sequences in one call: their bags of ranks (KnapFormer's greedy) and the ranks of their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.bags import BagTopology
from dbsp_core.utils.errors import UserError, require_value

PICO = 10**12
"""Costs are integer picoseconds, so that sums do not depend on order or machine."""


@dataclass(frozen=True)
class SequenceCost:
    """Seconds of one layer's forward pass: `token_s` · tokens + `block_s` · active blocks of all heads.

    KnapFormer's Eq. 2, (24·n·d² + γ·4·n²·d) / F, is the special case of one block per token pair.

    Raises:
        UserError: A time is not positive (`block_s` may be 0).
    """

    token_s: float  # Seconds per token, except attention's scores and values
    block_s: float  # Seconds per active block of one head

    def __post_init__(self) -> None:
        require_value(self, "token_s", 0 < self.token_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")
        require_value(self, "block_s", 0 <= self.block_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")

    def picoseconds(self, tokens: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Returns costs int64[n] of tokens int64[n] and active blocks int64[n], each term rounded."""
        linear, attention = np.rint(tokens * (self.token_s * PICO)), np.rint(blocks * (self.block_s * PICO))
        return linear.astype(np.int64) + attention.astype(np.int64)


@dataclass(frozen=True, eq=False, repr=False)
class TokenRuns:
    """Runs of tokens of one sequence on one rank, which partition all tokens. All fields are int64[runs].

    Sorted by rank, sequence and start, which is the order of tokens on a rank.
    """

    sequence: np.ndarray
    start: np.ndarray  # First token's position in its sequence
    length: np.ndarray  # Number of tokens, at least 1
    rank: np.ndarray

    @classmethod
    def sorted(cls, sequence: np.ndarray, start: np.ndarray, length: np.ndarray, rank: np.ndarray) -> TokenRuns:
        """Sorts runs and drops empty ones."""
        some = np.flatnonzero(length)
        some = some[np.lexsort((start[some], sequence[some], rank[some]))]
        return cls(sequence[some], start[some], length[some], rank[some])

    def by_rank(self, world: int) -> np.ndarray:
        """Returns the number of tokens per rank, int64[world]."""
        return np.bincount(self.rank, self.length, world).astype(np.int64)

    def positions(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rank and position on it of each token of the concatenated sequences, int64[Σ tokens] each."""
        first = np.cumsum(tokens) - tokens
        offset = np.cumsum(self.length) - self.length
        rank_first = np.searchsorted(self.rank, self.rank)  # index of the first run on the same rank
        within = np.arange(int(self.length.sum())) - np.repeat(offset, self.length)
        token = np.repeat(first[self.sequence] + self.start, self.length) + within
        rank, local = np.empty_like(token), np.empty_like(token)
        rank[token] = np.repeat(self.rank, self.length)
        local[token] = np.repeat(offset - offset[rank_first], self.length) + within
        return rank, local


@dataclass(frozen=True, eq=False, repr=False)
class SequencePlan:
    """The ranks that hold each sequence's tokens between attentions, and the ranks that share its attention."""

    topology: BagTopology  # The bags
    bag: np.ndarray  # int64[n], bag of each sequence, numbered over the cluster
    runs: TokenRuns  # The tokens that each rank holds

    def __repr__(self) -> str:
        return f"<SequencePlan of {len(self.bag)} sequences, {self.topology}>"


def plan_sequences(
    cost: np.ndarray,
    tokens: np.ndarray,
    loader: np.ndarray,
    topology: BagTopology,
    max_tokens: int | None = None,
) -> SequencePlan:
    """Assigns sequences to bags, in integer arithmetic: equal arguments give equal plans on every rank.

    The bags do not depend on the order of sequences, except among identical ones.

    Args:
        cost: int64[n], cost of each sequence from `SequenceCost.picoseconds`.
        tokens: int64[n].
        loader: int64[n], rank that loads each sequence, which stays within that rank's unit of bags.
        topology: The bags.
        max_tokens: Most tokens per rank. None: no limit.

    Raises:
        UserError: No sequences, ranks out of range, or a sequence that no bag can hold.
    """
    cost, tokens, loader = (np.asarray(values, dtype=np.int64) for values in (cost, tokens, loader))
    if len(tokens) == 0:
        raise UserError("expected at least one sequence, got none; pass the call's sequences")
    if int(tokens.min()) < 1:
        raise UserError("every sequence needs at least one token; remove empty sequences")
    if int(loader.min()) < 0 or int(loader.max()) >= topology.world:
        raise UserError(
            f"sequences are loaded by ranks {int(loader.min())} to {int(loader.max())}, but bags {topology} have "
            f"ranks 0 to {topology.world - 1}; use bags for all ranks"
        )
    if max_tokens is not None:
        _require_room(tokens, topology, max_tokens)
    bag = _greedy_bags(cost, tokens, loader, topology, max_tokens)
    return SequencePlan(topology, bag, _split_equally(tokens, bag, loader, topology))


def _require_room(tokens: np.ndarray, topology: BagTopology, max_tokens: int) -> None:
    """Raises UserError if the longest sequence exceeds the largest bag."""
    longest, largest = int(tokens.argmax()), max(topology.sizes)
    length = int(tokens[longest])
    if length <= largest * max_tokens:
        return
    needed = -(-length // max_tokens)
    fits = next((size for size in range(needed, topology.world + 1) if topology.world % size == 0), None)
    advice = (
        f"bags of {needed} ranks or more hold it, for example g{fits}n{topology.world // fits}"
        if fits
        else f"all {topology.world} ranks together hold too few; allow {-(-length // topology.world):,} tokens a rank"
    )
    raise UserError(
        f"sequence {longest} of {length:,} tokens exceeds every bag of {topology}: at {max_tokens:,} tokens a rank "
        f"the largest, of {largest}, holds {largest * max_tokens:,}; {advice}"
    )


def _greedy_bags(
    cost: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology, max_tokens: int | None
) -> np.ndarray:
    """Assigns sequences to bags, costliest first → int64[n]; arguments as in `plan_sequences`.

    The paper does not cover sequences for which no bag has capacity left. Like its published program, this considers
    bags whose total capacity would do, else the largest bags.
    """
    unit, bags, sizes = loader // topology.unit, len(topology.sizes), topology.ranks.tolist()
    capacity = [sum(cost[unit == number].tolist()) for number in range(topology.units)]  # of a whole unit
    load = [0] * len(sizes)
    room = [math.inf if max_tokens is None else size * max_tokens for size in sizes]
    chosen = np.empty(len(cost), dtype=np.int64)
    for sequence in np.lexsort((loader, tokens, -cost)).tolist():
        cost_here, length, first = int(cost[sequence]), int(tokens[sequence]), int(unit[sequence])
        # 1. For each bag size, the emptiest bag with room for the tokens (ties: first)
        emptiest: dict[int, int] = {}
        for bag in range(first * bags, (first + 1) * bags):
            if room[bag] < length:
                continue
            if load[bag] < load[emptiest.setdefault(sizes[bag], bag)]:
                emptiest[sizes[bag]] = bag
        if not emptiest:
            most = max(room[first * bags : (first + 1) * bags])
            raise UserError(
                f"a sequence of {length:,} tokens does not fit in the bags of {topology} with those before it: at "
                f"most {most:,} tokens are left in one; allow more tokens a rank, or use more ranks"
            )
        # 2. Sizes whose share of the cost has room for the sequence, else could hold it alone, else the largest
        share = {size: size * capacity[first] for size in emptiest}
        fitting = [size for size, bag in emptiest.items() if (load[bag] + cost_here) * topology.unit <= share[size]]
        fitting = fitting or [size for size in emptiest if cost_here * topology.unit <= share[size]] or [max(emptiest)]
        # 3. Among these, the bag with the least load per rank
        per_rank = {emptiest[size]: load[emptiest[size]] * (topology.multiple // size) for size in fitting}
        bag = min(per_rank, key=lambda candidate: (per_rank[candidate], candidate))
        chosen[sequence] = bag
        load[bag] += cost_here
        room[bag] -= length
    return chosen


def _split_equally(tokens: np.ndarray, bag: np.ndarray, loader: np.ndarray, topology: BagTopology) -> TokenRuns:
    """Splits each bag's tokens equally over its ranks (to within one), moving few; arrays are int64[n]."""
    # 1. Quotas
    total, bags = np.bincount(bag, tokens, len(topology.ranks)).astype(np.int64), topology.bag_of_rank
    offset = np.arange(topology.world) - topology.first_rank[bags]
    quota = total[bags] // topology.ranks[bags] + (offset < total[bags] % topology.ranks[bags])
    # 2. Tokens whose loader is in their bag stay there, up to its quota
    loaded_here = np.flatnonzero(topology.bag_of_rank[loader] == bag)
    loaded_here = loaded_here[np.argsort(loader[loaded_here], kind="stable")]
    running = np.cumsum(tokens[loaded_here]) - tokens[loaded_here]
    running -= running[np.searchsorted(loader[loaded_here], loader[loaded_here])]
    kept = np.zeros_like(tokens)
    kept[loaded_here] = np.clip(quota[loader[loaded_here]] - running, 0, tokens[loaded_here])
    # 3. The other tokens of each bag fill its ranks in order, up to their quotas
    order = np.argsort(bag, kind="stable")
    pool, free = (tokens - kept)[order], quota - np.bincount(loader, kept, topology.world).astype(np.int64)
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
