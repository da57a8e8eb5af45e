"""Several sequences of one call: to bags of ranks (KnapFormer's greedy), and their tokens to ranks."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.bags import BagTopology, parse_terms
from dbsp_core.utils.errors import UserError, bad_value, blame_setting, require_value

__all__ = [
    "AUTO",
    "PICO",
    "BagConfig",
    "SequenceCost",
    "SequencePlan",
    "TokenRuns",
    "greedy_bags",
    "plan_sequences",
    "staying",
]


PICO = 10**12
"""Costs are whole picoseconds: their sums are the same bits in any order and on any machine."""


@dataclass(frozen=True)
class SequenceCost:
    """Seconds of one layer's forward pass: `token_s` · tokens + `block_s` · dense blocks of all heads.

    KnapFormer's Eq. 2, (24·n·d² + γ·4·n²·d) / F, is the same with one block a token pair: see `gamma_corrected`.

    Attributes:
        token_s: Seconds a token, of everything but attention's scores and values.
        block_s: Seconds a dense block of one head.

    Raises:
        UserError: For seconds that are not positive (`block_s` may be 0).
    """

    token_s: float
    block_s: float

    def __post_init__(self) -> None:
        require_value(self, "token_s", 0 < self.token_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")
        require_value(self, "block_s", 0 <= self.block_s < 1, "must lie between 0 and 1 s", "cost of a sequence: ")

    @classmethod
    def gamma_corrected(cls, width: int, gamma: float, flops_per_s: float = 1e15, heads: int = 1) -> SequenceCost:
        """KnapFormer's Eq. 2 for a model of width d and blocks of 1 × 1 tokens; `heads` share a pair's 4·d FLOP."""
        return cls(24 * width**2 / flops_per_s, gamma * 4 * width / flops_per_s / heads)

    def picoseconds(self, tokens: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """int64[n] of int64[n] tokens and int64[n] dense blocks: each term rounded to whole picoseconds."""
        linear, attention = np.rint(tokens * (self.token_s * PICO)), np.rint(blocks * (self.block_s * PICO))
        return linear.astype(np.int64) + attention.astype(np.int64)


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


_Entry = tuple[int, int]
"""(load, bag of the unit)"""


def greedy_bags(
    cost: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology, most_tokens: np.ndarray
) -> np.ndarray:
    """Chooses the bag of each sequence, in whole numbers only, so that every rank decides the same.

    Where no bag has room left the paper says nothing. Its published program then looks among the bags whose whole
    capacity would do, else among the largest ones; so does this.

    Args:
        cost: int64[n].
        tokens: int64[n].
        loader: int64[n], the rank that loads each sequence.
        most_tokens: int64[bags], what each bag can hold.

    Returns:
        int64[n].

    Raises:
        UserError: A sequence no longer fits into any bag of its unit.
    """
    bag = np.empty(len(cost), dtype=np.int64)
    unit_of = loader // topology.unit
    for unit in range(topology.units):
        mine = np.flatnonzero(unit_of == unit)
        mine = mine[np.argsort(-cost[mine], kind="stable")]
        first = unit * len(topology.sizes)
        room = most_tokens[first : first + len(topology.sizes)].tolist()
        chosen = _Unit(topology, room, int(cost[mine].sum()))
        bag[mine] = [first + chosen.take(*one) for one in zip(cost[mine].tolist(), tokens[mine].tolist(), strict=True)]
    return bag


class _Unit:
    """The bags of a unit. Of bags of one size only the emptiest is looked at: it has the most room left."""

    def __init__(self, topology: BagTopology, room: list[int], total: int) -> None:
        self.topology, self.room, self.total = topology, room, total
        self.by_size = {
            size: [(0, bag) for bag, own in enumerate(topology.sizes) if own == size] for size in set(topology.sizes)
        }

    def take(self, weight: int, length: int) -> int:
        """Puts a sequence into a bag, and says which."""
        emptiest = dict(self._emptiest(length))
        if not emptiest:
            raise UserError(
                f"a sequence of {length:,} tokens does not fit beside those before it in the bags of "
                f"{self.topology}: at most {max(self.room):,} tokens are left in one; allow more tokens a rank, or "
                "use more ranks"
            )
        sizes = [size for size, (load, _) in emptiest.items() if self._within(load + weight, size)]
        sizes = sizes or [size for size in emptiest if self._within(weight, size)] or [max(emptiest)]
        multiple = self.topology.multiple
        size = min(sizes, key=lambda size: (emptiest[size][0] * (multiple // size), emptiest[size][1]))
        load, bag = emptiest[size]
        self.by_size[size].remove((load, bag))
        self.by_size[size].append((load + weight, bag))
        heapq.heapify(self.by_size[size])
        self.room[bag] -= length
        return bag

    def _within(self, load: int, size: int) -> bool:
        """True where a bag's capacity, its ranks' share of all cost, is at least this load."""
        return load * self.topology.unit <= size * self.total

    def _emptiest(self, length: int) -> Iterator[tuple[int, _Entry]]:
        """Yields, for each size of bag, the emptiest bag that has room for this many tokens."""
        for size, bags in self.by_size.items():
            fits = (entry for entry in bags[:1] if self.room[entry[1]] >= length)
            found = next(fits, None) or min((e for e in bags if self.room[e[1]] >= length), default=None)
            if found is not None:
                yield size, found


AUTO = "auto"
_UNLIMITED = 1 << 61
_BITS = 62


@dataclass(frozen=True)
class BagConfig:
    """How several sequences are shared out over the ranks. Raises SettingError for values out of range.

    Attributes:
        topology: As KnapFormer writes it, such as "g8n4"; "auto": the one with the least modelled forward time of the
            first sequences, or whenever those that follow do not fit.
        max_tokens: What a rank can hold; None: any number.
    """

    topology: str = AUTO
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        with blame_setting("topology"):
            if self.topology != AUTO:
                parse_terms(self.topology)
        if self.max_tokens is not None and self.max_tokens < 1:
            raise bad_value(self, "max_tokens", "must be at least 1; leave it out for no limit", "bags.")

    def require_ranks(self, world: int) -> None:
        """Raises UserError for a topology that does not fit the ranks."""
        if self.topology != AUTO:
            BagTopology.parse(self.topology, world)


@dataclass(frozen=True, eq=False, repr=False)
class SequencePlan:
    """The ranks that hold each sequence's tokens between attentions, and the ranks that share its attention.

    Attributes:
        topology: The bags.
        bag: int64[n], the bag of each sequence, numbered over the whole cluster.
        runs: The tokens that each rank holds.
    """

    topology: BagTopology
    bag: np.ndarray
    runs: TokenRuns

    def __repr__(self) -> str:
        return f"<SequencePlan of {len(self.bag)} sequences, {self.topology}>"


def plan_sequences(
    cost: np.ndarray,
    tokens: np.ndarray,
    loader: np.ndarray,
    topology: BagTopology,
    max_tokens: int | None = None,
) -> SequencePlan:
    """Shares out sequences. Deterministic, in whole numbers: equal arguments give equal plans on every rank.

    The bags do not depend on the order in which sequences are listed, up to sequences that are alike.

    Args:
        cost: int64[n], what each sequence costs, as `SequenceCost.picoseconds` has it.
        tokens: int64[n].
        loader: int64[n], the rank that loads each sequence. It stays within that rank's unit of bags.
        topology: The bags.
        max_tokens: What a rank can hold; None: any number.

    Raises:
        UserError: For no sequences, lists of different lengths, ranks that there are not, or a sequence that no
            bag can hold.
    """
    cost, tokens, loader = (np.asarray(values, dtype=np.int64) for values in (cost, tokens, loader))
    _check(cost, tokens, loader, topology)
    _require_room(tokens, topology, max_tokens)
    most_tokens = topology.ranks * max_tokens if max_tokens else np.full(len(topology.ranks), _UNLIMITED)
    # Products of loads and numbers of ranks must stay whole numbers of 64 bits.
    excess = (sum(cost.tolist()) * topology.world * topology.multiple).bit_length() - _BITS
    small = cost >> max(excess, 0)
    # In an order of their own: which bags there are does not depend on the order in which sequences are listed.
    order = np.lexsort((loader, tokens, small))
    bag = np.empty_like(order)
    bag[order] = greedy_bags(small[order], tokens[order], loader[order], topology, most_tokens)
    return SequencePlan(topology, bag, staying(tokens, bag, loader, topology))


def _check(cost: np.ndarray, tokens: np.ndarray, loader: np.ndarray, topology: BagTopology) -> None:
    if len(tokens) == 0:
        raise UserError("there are no sequences to share out; give at least one")
    if not cost.shape == tokens.shape == loader.shape == (len(tokens),):
        raise UserError(
            f"cost, tokens and loader must have one number a sequence, got {cost.shape}, {tokens.shape} and "
            f"{loader.shape}"
        )
    if int(tokens.min()) < 1 or int(cost.min()) < 0:
        raise UserError(
            "every sequence needs at least one token and a cost that is not negative; leave empty ones out"
        )
    if int(loader.min()) < 0 or int(loader.max()) >= topology.world:
        raise UserError(
            f"sequences are loaded by ranks {int(loader.min())} to {int(loader.max())}, but bags {topology} have "
            f"ranks 0 to {topology.world - 1}; use bags for all ranks"
        )


def _require_room(tokens: np.ndarray, topology: BagTopology, max_tokens: int | None) -> None:
    longest, largest = int(tokens.argmax()), max(topology.sizes)
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens={max_tokens} must be at least 1; leave it out for no limit")
    if max_tokens is None or tokens[longest] <= largest * max_tokens:
        return
    length = int(tokens[longest])
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
