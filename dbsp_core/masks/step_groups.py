"""Step groups: runs of denoising steps that share their masks."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from dbsp_core.utils.errors import UserError, in_short

__all__ = ["StepGroups"]

_RANGE = re.compile(r"\s*(\d{1,9})(?:(-)(\d{0,9}))?\s*")


@dataclass(frozen=True)
class StepGroups:
    """Consecutive runs of denoising steps. Steps before the first group are dense.

    Attributes:
        starts: First step of each group, ascending.
        end: One past the last group's last step; None if it has no end.

    Raises:
        UserError: For groups that are empty or out of order.
    """

    starts: tuple[int, ...]
    end: int | None = None

    def __post_init__(self) -> None:
        bounds = self.starts if self.end is None else (*self.starts, self.end)
        if not self.starts or self.starts[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"step groups that start at {list(self.starts)} and end at {self.end} are not ascending")

    @classmethod
    def parse(cls, text: str) -> StepGroups:
        """Reads "5-9,10-24,25-49": first and last step of each group; the last group may be open, "25-".

        Raises:
            UserError: For anything else, and for groups with gaps between them.
        """
        starts, end = [], None
        for index, part in enumerate(text.split(",")):
            found = _RANGE.fullmatch(part)
            if found is None or (index > 0 and end is None):
                raise UserError(
                    f"step groups {in_short(text)} are not of the form '0-9,10-24,25-49' (or '…,25-' for a last group "
                    "without an end)"
                )
            first, dash, last = found.groups()
            if index > 0 and int(first) != end:
                raise UserError(
                    f"step groups {in_short(text)}: {part.strip()!r} must start at step {end}, without a gap"
                )
            starts.append(int(first))
            end = int(first) + 1 if not dash else int(last) + 1 if last else None
        return cls(tuple(starts), end)

    @classmethod
    def even(cls, groups: int, steps: int, dense_steps: int = 0) -> StepGroups:
        """Groups as PAROAttention maps steps to masks: step s of n gets mask floor(s · groups / n).

        Leading `dense_steps` are taken from the first group.

        Raises:
            UserError: For fewer steps than groups, or a first group without steps.
        """
        if not 1 <= groups <= steps or not 0 <= dense_steps < steps:
            raise UserError(f"{groups} step groups don't fit into {steps} steps, {dense_steps} of them dense")
        starts = [-(-group * steps // groups) for group in range(groups)]
        if dense_steps and dense_steps >= (starts[1] if groups > 1 else steps):
            raise UserError(
                f"{dense_steps} dense steps leave none for the first of {groups} groups over {steps} steps; leave the "
                "dense steps to the configuration, paro.dense_steps"
            )
        return cls((dense_steps, *starts[1:]), steps)

    def __len__(self) -> int:
        return len(self.starts)

    def __str__(self) -> str:
        ends = (*self.starts[1:], self.end)
        return ",".join(f"{a}-{'' if b is None else b - 1}" for a, b in zip(self.starts, ends, strict=True))

    def find(self, step: int) -> int | None:
        """The group of a step; None for a dense step before the first. Raises UserError beyond the last."""
        if self.end is not None and step >= self.end:
            raise UserError(
                f"has masks for steps {self.starts[0]} to {self.end - 1} (groups {self}), none for step {step}"
            )
        return None if step < self.starts[0] else bisect_right(self.starts, step) - 1
