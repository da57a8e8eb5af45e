"""Bags: groups of ranks that share sequences, in KnapFormer's notation (§3.2)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from dbsp_core.utils.errors import UserError, blame_setting, require_value

_TERM = re.compile(r"g(\d{1,9})n(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True)
class BagTopology:
    """Bags of adjacent ranks. A unit of bags is repeated over the cluster; sequences stay within their unit.

    "g1n2+g2n1+g4n1" is a unit of two bags of one rank, one of two and one of four; "g1n1" leaves sequences in place.

    Raises:
        UserError: There are no bags, or a size is below 1.
    """

    sizes: tuple[int, ...]  # ranks in each bag of a unit, in rank order
    units: int = 1  # repetitions of the unit

    def __post_init__(self) -> None:
        if not self.sizes or min(*self.sizes, self.units) < 1:
            raise UserError(f"bags need at least one rank each, and one bag, got sizes {self.sizes} × {self.units}")

    @classmethod
    def parse(cls, text: str, world: int) -> BagTopology:
        """Parses "g1n2+g2n1+g4n1" for `world` ranks.

        Raises:
            UserError: The text is malformed, or its unit does not divide `world`.
        """
        counts = _parse_terms(text)
        unit = sum(size * number for size, number in counts)
        if unit > world or world % unit:
            fits = ", ".join(f"g{size}n{world // size}" for size in range(1, world + 1) if world % size == 0)
            raise UserError(
                f"bags {text!r} make units of {unit} ranks, which do not divide {world}; for {world} ranks use {fits}"
            )
        return cls(tuple(size for size, number in counts for _ in range(number)), world // unit)

    def __str__(self) -> str:
        return "+".join(f"g{size}n{len(list(run))}" for size, run in groupby(self.sizes))

    @property
    def unit(self) -> int:
        """Ranks per unit."""
        return sum(self.sizes)

    @property
    def world(self) -> int:
        return self.unit * self.units

    @cached_property
    def ranks(self) -> np.ndarray:
        """int64[bags]: number of ranks in each bag of the cluster."""
        return np.tile(np.array(self.sizes, dtype=np.int64), self.units)

    @cached_property
    def first_rank(self) -> np.ndarray:
        """int64[bags]: the first rank of each bag."""
        return np.cumsum(self.ranks) - self.ranks

    @cached_property
    def bag_of_rank(self) -> np.ndarray:
        """int64[world]: the bag of each rank."""
        return np.repeat(np.arange(len(self.ranks)), self.ranks)

    @cached_property
    def multiple(self) -> int:
        """Least common multiple of the bags' sizes, so that load · multiple / size is an integer."""
        return math.lcm(*self.sizes)


def _parse_terms(text: str) -> list[tuple[int, int]]:
    """Returns (ranks per bag, number of bags) of each term. Raises UserError for malformed text."""
    terms = [_TERM.fullmatch(term.strip()) for term in text.split("+")]
    counts = [(int(term[1]), int(term[2])) for term in terms if term is not None]
    if len(counts) < len(terms) or any(min(pair) < 1 for pair in counts):
        raise UserError(
            f"bags {text!r} are not of the form gGnN, N bags of G ranks, joined by +: for example g8n4 or "
            "g1n2+g2n1+g4n1"
        )
    return counts


@dataclass(frozen=True)
class BagConfig:
    """Settings for sharing several sequences. Raises SettingError for values out of range.

    Attributes:
        topology: Bags in KnapFormer's notation: "g8n4" is 4 bags of 8 ranks.
        max_tokens: Most tokens per rank. None: no limit.
    """

    topology: str
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        with blame_setting("topology"):
            _parse_terms(self.topology)
        fits = self.max_tokens is None or self.max_tokens >= 1
        require_value(self, "max_tokens", fits, "must be at least 1; omit it for no limit", "bags.")

    def require_ranks(self, world: int) -> None:
        """Raises UserError if the topology does not fit `world` ranks."""
        BagTopology.parse(self.topology, world)
