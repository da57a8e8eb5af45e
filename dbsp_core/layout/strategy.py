"""The parallel strategy UxRy: x Ulysses ranks (heads) times y ring ranks (blocks)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from dbsp_core.utils.errors import UserError, in_short, kind_of

_PATTERN = re.compile(r"U(\d{1,9})R(\d{1,9})", re.IGNORECASE)


@dataclass(frozen=True, order=True)
class Strategy:
    """UxRy over x·y ranks: rank = ring_rank · x + ulysses_rank, so the ranks of a Ulysses group are adjacent.

    Attributes:
        ulysses: x, ranks among which heads are divided.
        ring: y, ranks among which each head's query blocks are divided.

    Raises:
        UserError: A degree is below 1.
    """

    ulysses: int
    ring: int

    def __post_init__(self) -> None:
        if self.ulysses < 1 or self.ring < 1:
            raise UserError(f"strategy {self} needs both degrees to be at least 1, for example U4R2")

    @classmethod
    def parse(cls, text: str | Strategy) -> Strategy:
        """Parses "U4R2" (any case). Raises UserError for other text."""
        if isinstance(text, Strategy):
            return text
        if not isinstance(text, str) or text.strip().lower() == "auto":
            shown = repr(text) if isinstance(text, (int, float)) else kind_of(text)
            got = "'auto' is a setting of sessions" if isinstance(text, str) else f"got {shown}"
            raise UserError(f"expected a strategy of the form UxRy, for example U4R2 for 8 GPUs; {got}")
        match = _PATTERN.fullmatch(text.strip())
        if match is None:
            raise UserError(f"strategy {in_short(text)} is not of the form UxRy, for example U4R2 for 8 GPUs")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def all_for(cls, world: int) -> tuple[Strategy, ...]:
        """Returns every UxRy with x·y = world, from pure Ulysses to pure ring."""
        if world < 1:
            raise UserError(f"the number of GPUs must be at least 1, got {world}")
        return tuple(cls(x, world // x) for x in range(world, 0, -1) if world % x == 0)

    @cached_property
    def world(self) -> int:
        return self.ulysses * self.ring

    def require_world(self, world: int) -> None:
        """Raises UserError unless the strategy uses exactly `world` ranks."""
        if self.world != world:
            choices = ", ".join(str(s) for s in Strategy.all_for(world))
            raise UserError(
                f"strategy {self} needs {self.ulysses}·{self.ring} = {self.world} GPUs, got {world}; "
                f"use one of {choices}"
            )

    def __str__(self) -> str:
        return f"U{self.ulysses}R{self.ring}"
