"""Shares several sequences out over the ranks: the bag of each, and the tokens of it that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.sequences.bags import BagTopology, parse_terms
from dbsp_core.planning.sequences.balancing import even_bags
from dbsp_core.planning.sequences.knapsack import greedy_bags
from dbsp_core.planning.sequences.shards import TokenRuns, chunks, staying
from dbsp_core.utils.errors import SettingError, UserError, bad_value, blame_setting, did_you_mean

__all__ = ["AUTO", "BALANCERS", "BagConfig", "SequencePlan", "plan_sequences"]

BALANCERS = ("dbsp", "knapsack")
"""Ours, and KnapFormer's (§3.3)."""
AUTO = "auto"
_UNLIMITED = 1 << 61
_BITS = 62


@dataclass(frozen=True)
class BagConfig:
    """How several sequences are shared out over the ranks. Raises SettingError for values out of range.

    Attributes:
        topology: As KnapFormer writes it, such as "g8n4"; "auto": the one with the least modelled forward time of the
            first sequences, or whenever those that follow do not fit.
        balancer: See `plan_sequences`.
        max_tokens: What a rank can hold; None: any number.
    """

    topology: str = AUTO
    balancer: str = "dbsp"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        with blame_setting("topology"):
            if self.topology != AUTO:
                parse_terms(self.topology)
        _require_balancer(self.balancer)
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
        balancer: "dbsp" or "knapsack": the ranks of a bag share attention by balanced rows, or by whole heads.
        bag: int64[n], the bag of each sequence, numbered over the whole cluster.
        runs: The tokens that each rank holds.
    """

    topology: BagTopology
    balancer: str
    bag: np.ndarray
    runs: TokenRuns

    def __repr__(self) -> str:
        return f"<SequencePlan of {len(self.bag)} sequences by {self.balancer}, {self.topology}>"


def plan_sequences(
    cost: np.ndarray,
    tokens: np.ndarray,
    loader: np.ndarray,
    topology: BagTopology,
    balancer: str = "dbsp",
    max_tokens: int | None = None,
) -> SequencePlan:
    """Shares out sequences. Deterministic, in whole numbers: equal arguments give equal plans on every rank.

    The bags do not depend on the order in which sequences are listed, up to sequences that are alike.

    Args:
        cost: int64[n], what each sequence costs, as `SequenceCost.picoseconds` has it.
        tokens: int64[n].
        loader: int64[n], the rank that loads each sequence. It stays within that rank's unit of bags.
        topology: The bags.
        balancer: "dbsp": even bags, ranks with as many tokens each. "knapsack": KnapFormer's greedy, each sequence in
            even chunks.
        max_tokens: What a rank can hold; None: any number.

    Raises:
        UserError: For no sequences, lists of different lengths, ranks that there are not, an unknown balancer, or a
            sequence that no bag can hold.
    """
    _require_balancer(balancer)
    cost, tokens, loader = (np.asarray(values, dtype=np.int64) for values in (cost, tokens, loader))
    _check(cost, tokens, loader, topology)
    _require_room(tokens, topology, max_tokens)
    most_tokens = topology.ranks * max_tokens if max_tokens else np.full(len(topology.ranks), _UNLIMITED)
    # Products of loads and numbers of ranks must stay whole numbers of 64 bits.
    excess = (sum(cost.tolist()) * topology.world * topology.multiple).bit_length() - _BITS
    small = cost >> max(excess, 0)
    # In an order of their own: which bags there are does not depend on the order in which sequences are listed.
    order = np.lexsort((loader, tokens, small))
    choose = greedy_bags if balancer == "knapsack" else even_bags
    bag = np.empty_like(order)
    bag[order] = choose(small[order], tokens[order], loader[order], topology, most_tokens)
    knapsack = balancer == "knapsack"
    runs = chunks(tokens, bag, topology) if knapsack else staying(tokens, bag, loader, topology)
    return SequencePlan(topology, balancer, bag, runs)


def _require_balancer(name: str) -> None:
    if name not in BALANCERS:
        known = f"{' or '.join(BALANCERS)}{did_you_mean(name, BALANCERS)}"
        raise SettingError(f"unknown balancer {name!r}; use {known}", ("balancer",))


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
