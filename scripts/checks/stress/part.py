"""What the parts of the stress tests have in common: numbered cases, drawn from a seed, and their outcomes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """End of a case. failure: what is wrong, in one line, or None;  measure: numbers, of which the largest counts"""

    failure: str | None = None
    measure: Mapping[str, float] = field(default_factory=dict)


class Part(ABC):
    """A kind of cases, each drawn from (seed, number) alone."""

    @abstractmethod
    def draw(self, seed: int, number: int) -> Any:
        """Returns the same case for equal arguments, on every machine; `str` of it is one line."""

    @abstractmethod
    def outcome(self, case: Any) -> Outcome:
        """Runs and judges one case."""

    def close(self) -> None:  # noqa: B027  most parts have none
        """Ends the processes that cases run in, if there are any."""


def in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
