"""Denoising steps: dense steps, step groups that share a mask, and counting a framework's passes."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dbsp_core.utils.errors import UserError, in_short, require_value

_RANGE = re.compile(r"\s*(\d{1,9})(?:(-)(\d{0,9}))?\s*")


@dataclass(frozen=True)
class StepGroups:
    """Consecutive non-empty runs of denoising steps. Steps before the first group are dense."""

    starts: tuple[int, ...]  # First step of each group, ascending
    end: int | None = None  # One past the last group's last step; None: open

    def __post_init__(self) -> None:
        bounds = self.starts if self.end is None else (*self.starts, self.end)
        if not self.starts or self.starts[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"step groups that start at {list(self.starts)} and end at {self.end} are not ascending")

    @classmethod
    def parse(cls, text: str) -> StepGroups:
        """Parses "5-9,10-24,25-49", first and last step of each group; the last group may be open, "25-".

        Raises UserError for other text, and for gaps between groups.
        """
        starts, end = [], None
        for index, part in enumerate(text.split(",")):
            match = _RANGE.fullmatch(part)
            if match is None or (index > 0 and end is None):
                raise UserError(
                    f"step groups {in_short(text)} are not of the form '0-9,10-24,25-49' (or '…,25-' for a last group "
                    "without an end)"
                )
            first, dash, last = match.groups()
            if index > 0 and int(first) != end:
                raise UserError(f"step groups {in_short(text)}: {part.strip()!r} must start at step {end}")
            starts.append(int(first))
            end = int(first) + 1 if not dash else int(last) + 1 if last else None
        return cls(tuple(starts), end)

    def __len__(self) -> int:
        return len(self.starts)

    def __str__(self) -> str:
        ends = (*self.starts[1:], self.end)
        return ",".join(f"{a}-{'' if b is None else b - 1}" for a, b in zip(self.starts, ends, strict=True))

    def find(self, step: int) -> int | None:
        """Returns the group of a step; None for a dense step before the first. Raises UserError after the last."""
        if self.end is not None and step >= self.end:
            raise UserError(
                f"has masks for steps {self.starts[0]} to {self.end - 1} (groups {self}), none for step {step}"
            )
        return None if step < self.starts[0] else bisect_right(self.starts, step) - 1


MOST_PASSES = 4  # passes distinguished within a denoising step; guidance has two or three


@dataclass(frozen=True)
class DenoisingStep:
    """A denoising step and a CFG pass within it, both counted from 0."""

    step: int = 0
    cfg_branch: int = 0
    generation: int = field(default=0, compare=False, repr=False)  # ignored in comparisons


class Progress(NamedTuple):
    """The progress of a denoising as reported by its framework."""

    generation: object = None  # a different object for each generation
    step_index: int | None = None  # +1 per step; None during the first step, or if unknown
    first_index: int | None = None  # index of step 0; None: that of a generation's first pass


@dataclass
class StepClock:
    """Counts the steps and CFG passes of successive generations.

    Uses the framework's step index if there is one. Otherwise a lower timestep is a new step and a higher one a new
    generation. At an equal timestep (repeated by schedulers such as Heun's) a CFG pass that the step has already had
    begins the next step. If the framework does not name passes, each is another pass of the step, up to `MOST_PASSES`;
    further ones belong to new one-step generations. Timesteps equal after rounding to bfloat16 cannot be
    distinguished.
    """

    progress: Callable[[], Progress] = Progress  # queries the framework
    shared: bool = False  # True if several transformers advance it, each at every forward pass
    now: DenoisingStep = field(default_factory=DenoisingStep)
    _generation: object = None
    _generations: int = 1  # generations so far
    _timestep: float | None = None
    _index: int | None = None
    _first_index: int = 0  # index of step 0
    _branches: set[int] = field(default_factory=set)  # CFG passes of the current step

    def advance(self, timestep: Callable[[], float] | float, cfg_branch: int | None = None) -> DenoisingStep:
        """Counts a forward pass and returns its step. A callable `timestep` is called only if there is no index."""
        progress = self.progress()
        if progress.generation is not self._generation:  # the previous generation may have failed at the same step
            self._generation, self._timestep, self.now = progress.generation, None, DenoisingStep()
            self._begin_generation()
        if progress.step_index is None:
            step = self._by_timestep(timestep() if callable(timestep) else timestep, cfg_branch)
        else:
            step = self._by_index(progress.step_index, progress.first_index)
        if step != self.now.step:
            self._branches = set()
        elif len(self._branches) >= MOST_PASSES if cfg_branch is None else cfg_branch in self._branches:
            self._branches, self._generations = set(), self._generations + 1  # another generation of one step
        branch = len(self._branches) if cfg_branch is None else cfg_branch
        self.now = DenoisingStep(step, branch, self._generations)
        self._branches.add(branch)
        return self.now

    def _by_index(self, index: int, first_index: int | None) -> int:
        if self._index is None:  # schedulers have no index during the first step
            self._first_index = index - (self.now.step + 1 if self._branches else 0)
        elif index < self._index:
            self._begin_generation()
            self._first_index = index
        self._index = index
        if first_index is not None:
            self._first_index = first_index
        return index - self._first_index

    def _by_timestep(self, timestep: float, cfg_branch: int | None) -> int:
        last, self._timestep = self._timestep, timestep
        if last is None or timestep > last or self._index is not None:
            self._begin_generation()
            return 0
        return self.now.step + int(timestep < last or cfg_branch in self._branches)

    def _begin_generation(self) -> None:
        self._index, self._branches = None, set()
        self._generations += 1


MOST_VALUES = 1 << 16  # most values of a schedule to copy to the host
_schedules: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Version and values of each schedule; schedulers make a new tensor per generation."""


def first_value(values: torch.Tensor | float) -> float:
    """Returns the first element of `values`.

    A view such as `timesteps[i].expand(batch)` is looked up in a cached host copy of its base, so reading a whole
    schedule synchronizes with the device once. In inference mode views have no base and are read one by one.
    """
    if not isinstance(values, torch.Tensor):
        return float(values)
    base = values if values._base is None else values._base
    offset = values.storage_offset() - base.storage_offset()
    plain = base.is_contiguous() and base.dtype == values.dtype and 0 <= offset < base.numel() <= MOST_VALUES
    if base.is_inference() or not plain:
        return float(values[(0,) * values.ndim])
    known = _schedules.get(base)
    if known is None or known[0] != base._version:
        known = base._version, base.flatten().tolist()
        _schedules[base] = known
    return float(known[1][offset])


@dataclass(frozen=True)
class DenseSchedule:
    """Denoising steps and layers that keep dense attention.

    Attributes:
        first_steps: Denoising steps at the beginning.
        last_steps: Denoising steps at the end, if the pipeline or engine provides the number of steps.
        first_layers: Layers at the beginning.
        last_layers: Layers at the end.

    Raises:
        SettingError: A number is negative.
    """

    first_steps: int = 0
    last_steps: int = 0
    first_layers: int = 0
    last_layers: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require_value(self, name, value >= 0, "must not be negative", "dense_schedule.")

    @property
    def by_step(self) -> bool:
        """True if the answer depends on the step."""
        return self.first_steps > 0 or self.last_steps > 0

    def is_dense(self, layer: int, layers: int, step: int, steps: int | None) -> bool:
        """Returns True if a layer is dense at a step of `steps`. Raises UserError if `steps` is needed but None."""
        if layer < self.first_layers or layer >= layers - self.last_layers or step < self.first_steps:
            return True
        if self.last_steps == 0:
            return False
        if steps is None:
            raise UserError(
                "dense_schedule.last_steps needs the number of denoising steps, which this pipeline or engine does "
                "not provide; enable db-SP on the pipeline that you call, or leave last_steps at 0"
            )
        return step >= steps - self.last_steps

    def message(self, steps: int | None) -> str | None:
        """Returns a warning if all steps are dense, else None."""
        if steps is None or self.first_steps + self.last_steps < steps:
            return None
        return (
            f"dense_schedule makes all {steps} steps dense (first_steps {self.first_steps}, last_steps "
            f"{self.last_steps}), so db-SP cannot speed up attention; lower them, or raise generate.steps"
        )
