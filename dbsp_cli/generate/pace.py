"""How fast denoising steps go, and how long the rest of them will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

__all__ = ["Pace", "PaceColumn"]


@dataclass
class Pace:
    """Seconds a step, from the moments at which numbers of steps were done.

    The first step loads and compiles what later ones find ready: it counts only until a second one is done.

    Attributes:
        steps: Number of steps in all.
        now: The present moment, in seconds.
    """

    steps: int
    now: Callable[[], float] = time.monotonic
    _moments: dict[int, float] = field(default_factory=dict)

    def step(self, done: int) -> None:
        """Notes that `done` steps are done; a number that was noted before keeps its moment."""
        self._moments.setdefault(done, self.now())

    @property
    def seconds(self) -> float | None:
        """Mean seconds a step; None before one is done."""
        last = max(self._moments, default=0)
        first = min((done for done in self._moments if 0 < done < last), default=0)
        if first not in self._moments or last == first:
            return None
        return (self._moments[last] - self._moments[first]) / (last - first)

    @property
    def left(self) -> float | None:
        """Seconds until the last step will be done; None before the first one is, and after the last."""
        last = max(self._moments, default=0)
        if self.seconds is None or last >= self.steps:
            return None
        return max(0.0, (self.steps - last) * self.seconds - (self.now() - self._moments[last]))


class PaceColumn(ProgressColumn):
    """Seconds a step and time left, such as "3.21 s/step, 2:10 left"; nothing before a step is done."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(Column(no_wrap=True))
        self.pace = pace

    def render(self, task: Task) -> Text:
        seconds, left = self.pace.seconds, self.pace.left
        if seconds is None:
            return Text()
        return Text(f"{seconds:.3g} s/step" + ("" if left is None else f", {_clock(left)} left"))


def _clock(seconds: float) -> str:
    """A time as "2:10" or "1:02:10"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
