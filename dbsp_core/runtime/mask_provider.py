"""Provides the mask of each attention: from the mask source, or dense by schedule."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import DenoisingStep, DenseSchedule, StepClock, first_value
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource, parts_of
from dbsp_core.sources.base import packed_mask
from dbsp_core.utils.errors import UserError

DENSE = "dense by schedule"
"""Cache key of masks that are dense by schedule."""
_NOTHING_DENSE = DenseSchedule()


@dataclass
class MaskProvider:
    """One transformer's masks, equal on every rank and in a single process."""

    source: MaskSource
    schedule: DenseSchedule
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None  # Returns the number of denoising steps, or None if unknown
    count_steps: bool = False  # True to update `moment` even if no mask depends on it
    clock: StepClock = field(default_factory=StepClock)
    # Denoising step and CFG pass of the current forward pass
    moment: DenoisingStep = field(default_factory=DenoisingStep)
    _videos: tuple[Video, ...] = ()
    """Videos of the current forward pass; several are packed in this order and do not attend to each other."""

    @cached_property
    def predicts(self) -> bool:
        """True if masks are predicted from q and k at every call."""
        return self.source.changes == "per_call"

    @property
    def by_step(self) -> bool:
        """True if masks depend on the denoising step."""
        parts = parts_of(self.source)
        return self.schedule.by_step or any(p.changes == "per_step" or getattr(p, "by_step", False) for p in parts)

    def begin(
        self, videos: Sequence[Video], timestep: torch.Tensor | float | None, cfg_branch: int | None = None
    ) -> bool:
        """Starts a forward pass. Returns True if masks are predicted and a generation appears to begin.

        The timestep is read only if masks or plans depend on it and the framework does not provide the step.
        """
        self._videos = tuple(videos)
        counts = self.count_steps or self.clock.shared or self.source.changes != "never" or self.schedule.by_step
        if timestep is None or not counts:
            return self.predicts
        last, self.moment = self.moment, self.clock.advance(lambda: first_value(timestep), cfg_branch)
        return self.predicts and self.moment.generation != last.generation

    def grid(self) -> BlockGrid:
        """Returns the source's grid for this pass. Raises ValueError if the source rejects the size."""
        return BlockGrid.packed([self.source.grid(request) for request in self._requests(0)])

    def pass_key(self) -> Hashable:
        """Returns this pass's cache key apart from videos: dense layers and, if masks depend on it, the step."""
        dense = tuple(filter(self._is_dense, range(self.layers)))
        return dense, self.moment if self.source.changes == "per_step" else None

    def cache_key(self, layer: int) -> Hashable | None:
        """Returns a key that is equal for equal masks, or None if this layer's mask is predicted."""
        if self._is_dense(layer):
            return DENSE
        return None if self.predicts else tuple(self.source.cache_key(request) for request in self._requests(layer))

    def mask(self, layer: int, tokens: LocalQK | None = None) -> BlockMask:
        """Returns this layer's current mask, equal on all ranks. Collective if predicted from `tokens`.

        Raises:
            ValueError: The source rejects the request; for predicted masks, raised on every rank.
        """
        if self._is_dense(layer):
            return BlockMask.dense(self.heads, self.grid())
        requests, local_qk = self._requests(layer), (tokens,) if self.predicts else ()
        if len(requests) == 1:
            mask = self.source.mask(requests[0], *local_qk)
        else:
            sources = [(self.source.grid(request), self.source) for request in requests]
            mask = packed_mask(sources, requests[0], *local_qk)
        if mask.heads != self.heads and not self.predicts:
            raise UserError(f"expected a mask of {self.heads} heads, got {mask.heads} from the mask source")
        return mask

    def _is_dense(self, layer: int) -> bool:
        if self.schedule == _NOTHING_DENSE:
            return False
        steps = self.steps() if self.schedule.last_steps else None
        return self.schedule.is_dense(layer, self.layers, self.moment.step, steps)

    def _requests(self, layer: int) -> list[MaskRequest]:
        """Returns one request per video."""
        step, branch = self.moment.step, self.moment.cfg_branch
        return [
            MaskRequest(layer, self.heads, video.thw, video.text, step, branch, self.layers, video.text_runs)
            for video in self._videos
        ]
