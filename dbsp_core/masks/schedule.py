"""Which denoising step a forward pass belongs to, and which steps are dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from dbsp_core.utils.errors import UserError, require_value

__all__ = ["DenoisingStep", "DenseSchedule", "StepClock", "StepCounter"]


@dataclass(frozen=True)
class DenoisingStep:
    """step: of the denoising, 0 for the first;  cfg_branch: of the step's guidance passes, 0 for the first"""

    step: int = 0
    cfg_branch: int = 0


@dataclass
class StepCounter:
    """Counts steps and guidance passes.

    Timesteps fall from step to step and rise with a new generation. Where they stay, as some schedulers repeat them
    (Heun), the next step begins with a guidance pass that this one has had; where the host does not say which pass it
    is, each is taken for another one of the same step.
    """

    now: DenoisingStep = field(default_factory=DenoisingStep)
    _last: float | None = None
    _branches: set[int] = field(default_factory=set)
    """Of the current step."""

    def advance(self, timestep: float, cfg_branch: int | None = None) -> DenoisingStep:
        """The step of a forward pass at this timestep, which follows the passes counted before.

        cfg_branch: of the step's passes, where the host says it
        """
        step, last, self._last = self.now.step, self._last, timestep
        if last is None or timestep > last:
            step, self._branches = 0, set()
        elif timestep < last or cfg_branch in self._branches:
            step, self._branches = step + 1, set()
        self.now = DenoisingStep(step, len(self._branches) if cfg_branch is None else cfg_branch)
        self._branches.add(self.now.cfg_branch)
        return self.now


@dataclass
class StepClock:
    """Counts the steps of one generation after another. Transformers that take turns in a generation share one.

    generation: gives an object that is another one for each generation, where a host has one
    shared:     whether several transformers advance it: then each must, at every forward pass
    """

    generation: Callable[[], object] = lambda: None
    shared: bool = False
    _counter: StepCounter = field(default_factory=StepCounter)
    _last: object = None

    def advance(self, timestep: float, cfg_branch: int | None = None) -> DenoisingStep:
        """As `StepCounter.advance`."""
        generation = self.generation()
        if generation is not self._last:
            # The last one may have failed at the step with which this one begins.
            self._last, self._counter = generation, StepCounter()
        return self._counter.advance(timestep, cfg_branch)


@dataclass(frozen=True)
class DenseSchedule:
    """Where attention stays dense, as methods ask for: what forms the picture first, and what refines it last.

    first_steps, last_steps:   denoising steps at either end
    first_layers, last_layers: layers at either end
    Raises ValueError for negative numbers.
    """

    first_steps: int = 0
    last_steps: int = 0
    first_layers: int = 0
    last_layers: int = 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            require_value(
                self, setting.name, getattr(self, setting.name) >= 0, "must not be negative", "dense_schedule."
            )

    @property
    def by_step(self) -> bool:
        """Whether it depends on the step."""
        return self.first_steps > 0 or self.last_steps > 0

    def is_dense(self, layer: int, layers: int, step: int, steps: int | None) -> bool:
        """steps: of the whole denoising; None where the host does not say. Raises ValueError when it would matter."""
        if layer < self.first_layers or layer >= layers - self.last_layers or step < self.first_steps:
            return True
        if self.last_steps == 0:
            return False
        if steps is None:
            raise UserError(
                "dense_schedule.last_steps needs the number of denoising steps; attach db-SP to the pipeline, which "
                "knows it, rather than to the transformer alone, or leave last_steps at 0"
            )
        return step >= steps - self.last_steps
