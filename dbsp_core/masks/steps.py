"""Denoising steps: which are dense, which share a mask, and how a framework's passes are counted."""

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
    """Consecutive runs of denoising steps, not empty and in order. Steps before the first group are dense."""

    starts: tuple[int, ...]  # First step of each group, ascending
    end: int | None = None  # One past the last group's last step; None if it has no end

    def __post_init__(self) -> None:
        bounds = self.starts if self.end is None else (*self.starts, self.end)
        if not self.starts or self.starts[0] < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise UserError(f"step groups that start at {list(self.starts)} and end at {self.end} are not ascending")

    @classmethod
    def parse(cls, text: str) -> StepGroups:
        """Reads "5-9,10-24,25-49": first and last step of each group; the last group may be open, "25-".

        Raises UserError for anything else, and for groups with gaps between them.
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
                raise UserError(
                    f"step groups {in_short(text)}: {part.strip()!r} must start at step {end}, without a gap"
                )
            starts.append(int(first))
            end = int(first) + 1 if not dash else int(last) + 1 if last else None
        return cls(tuple(starts), end)

    def __len__(self) -> int:
        return len(self.starts)

    def __str__(self) -> str:
        ends = (*self.starts[1:], self.end)
        return ",".join(f"{a}-{'' if b is None else b - 1}" for a, b in zip(self.starts, ends, strict=True))

    def find(self, step: int) -> int | None:
        """Returns the group of a step; None for a dense step before the first. Raises UserError beyond the last."""
        if self.end is not None and step >= self.end:
            raise UserError(
                f"has masks for steps {self.starts[0]} to {self.end - 1} (groups {self}), none for step {step}"
            )
        return None if step < self.starts[0] else bisect_right(self.starts, step) - 1


MOST_PASSES = 4  # passes of one denoising step that are distinguished: guidance has two or three


@dataclass(frozen=True)
class DenoisingStep:
    """A step of the denoising and a CFG pass of the step, both counted from 0."""

    step: int = 0
    cfg_branch: int = 0
    generation: int = field(default=0, compare=False, repr=False)  # equal moments of two generations compare equal


class Progress(NamedTuple):
    """The progress of a denoising, as far as its framework knows it."""

    generation: object = None  # a different object for each generation
    step_index: int | None = None  # grows by one each step; None before a generation's first step is over, or unknown
    first_index: int | None = None  # the index of step 0; None: a generation's first pass is in step 0


@dataclass
class StepClock:
    """Counts the steps and CFG passes of one generation after another.

    If the framework gives an index, it decides. Otherwise timesteps fall from step to step and rise with a new
    denoising. If a timestep is repeated, as some schedulers do (Heun), the next step begins with a CFG pass
    that this one has had; if the framework does not name the pass, each counts as another one of the same step, up to
    `MOST_PASSES`. More are passes of further generations of one step, which begin with the first pass again.
    Timesteps that become equal by rounding to bfloat16 cannot be distinguished without an index.
    """

    progress: Callable[[], Progress] = Progress  # returns the framework's progress
    shared: bool = False  # True if several transformers of a generation advance it, each at every forward pass
    now: DenoisingStep = field(default_factory=DenoisingStep)
    _generation: object = None
    _generations: int = 1  # number of generations so far
    _timestep: float | None = None
    _index: int | None = None
    _first_index: int = 0  # index of step 0
    _branches: set[int] = field(default_factory=set)  # CFG passes of the current step

    def advance(self, timestep: Callable[[], float] | float, cfg_branch: int | None = None) -> DenoisingStep:
        """Counts a forward pass and returns its step. A `timestep` that is a function is called only without index."""
        progress = self.progress()
        if progress.generation is not self._generation:  # the last one may have failed at this one's first step
            self._generation, self._timestep, self.now = progress.generation, None, DenoisingStep()
            self._begin_generation()
        if progress.step_index is None:
            step = self._by_timestep(timestep() if callable(timestep) else timestep, cfg_branch)
        else:
            step = self._by_index(progress.step_index, progress.first_index)
        if step != self.now.step:
            self._branches = set()
        elif len(self._branches) >= MOST_PASSES if cfg_branch is None else cfg_branch in self._branches:
            self._branches, self._generations = set(), self._generations + 1  # another one of this step alone
        branch = len(self._branches) if cfg_branch is None else cfg_branch
        self.now = DenoisingStep(step, branch, self._generations)
        self._branches.add(branch)
        return self.now

    def _by_index(self, index: int, first_index: int | None) -> int:
        if self._index is None:  # a scheduler has none until its first step is over
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


MOST_VALUES = 1 << 16  # values of a schedule that are copied to the host, at most
_schedules: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Each schedule's version and values. A scheduler makes a new one for each generation."""


def first_value(values: torch.Tensor | float) -> float:
    """Returns the first element.

    A view, such as `timesteps[i].expand(batch)`, is looked up in a copy of all that it is a view of. So a schedule is
    read once, and waits for its device once, however many of its elements are asked for. In inference mode tensors do
    not say what they are views of: there each is read by itself.
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
    """The denoising steps and layers, at either end, whose attention stays dense.

    Attributes:
        first_steps: Denoising steps at the beginning.
        last_steps: Denoising steps at the end, if the pipeline or engine gives the number of steps.
        first_layers: Layers at the beginning.
        last_layers: Layers at the end.

    Raises:
        SettingError: For negative numbers.
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
        """Returns True if a layer is dense at a step of `steps`; UserError if that number is needed, but None."""
        if layer < self.first_layers or layer >= layers - self.last_layers or step < self.first_steps:
            return True
        if self.last_steps == 0:
            return False
        if steps is None:
            raise UserError(
                "dense_schedule.last_steps needs the number of denoising steps, which this pipeline or engine does "
                "not give; attach db-SP to the pipeline that you call, or leave last_steps at 0"
            )
        return step >= steps - self.last_steps

    def message(self, steps: int | None) -> str | None:
        """Says that a denoising of so many steps leaves nothing to sparse attention; None where it does, or may."""
        if steps is None or self.first_steps + self.last_steps < steps:
            return None
        return (
            f"dense_schedule makes all {steps} steps dense (first_steps {self.first_steps}, last_steps "
            f"{self.last_steps}): nothing will be gained; lower them, or take more steps (generate.steps)"
        )
