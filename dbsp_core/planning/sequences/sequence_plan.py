"""Shares several sequences out over the ranks: the bag of each, and the tokens of it that each rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core.planning.sequences.bags import BagTopology, parse_terms
from dbsp_core.planning.sequences.knapsack import greedy_bags
from dbsp_core.planning.sequences.shards import TokenRuns, staying
from dbsp_core.utils.errors import UserError, bad_value, blame_setting

__all__ = ["AUTO", "BagConfig", "SequencePlan", "plan_sequences"]

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
