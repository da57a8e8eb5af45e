"""Mask of each attention of a transformer: the source's, or a dense one if the schedule says so."""

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
"""Cache key of the mask of a layer that the schedule makes dense."""
_NOTHING_DENSE = DenseSchedule()


@dataclass
class MaskProvider:
    """One transformer's masks. The same answers on every rank, and in the single process that they are compared with.

    Attributes:
        steps: Returns the number of denoising steps, if a framework knows it.
        count_steps: True to keep `moment` also if no mask depends on it.
        moment: Denoising step and CFG pass of the current forward pass.
    """

    source: MaskSource
    schedule: DenseSchedule
    heads: int
    layers: int
    steps: Callable[[], int | None] = lambda: None
    count_steps: bool = False
    clock: StepClock = field(default_factory=StepClock)
    moment: DenoisingStep = field(default_factory=DenoisingStep)
    _videos: tuple[Video, ...] = ()
    """Videos of the current forward pass: several are packed, in this order, and none attends to another."""

    @cached_property
    def predicts(self) -> bool:
        """True if masks are predicted from q and k, at every call."""
        return self.source.changes == "per_call"

    @property
    def by_step(self) -> bool:
        """True if masks depend on the denoising step."""
        parts = parts_of(self.source)
        return self.schedule.by_step or any(p.changes == "per_step" or getattr(p, "by_step", False) for p in parts)

    def begin(
        self, videos: Sequence[Video], timestep: torch.Tensor | float | None, cfg_branch: int | None = None
    ) -> bool:
        """Starts a forward pass. Returns True if masks are predicted, and a generation begins as far as is known.

        Args:
            videos: One, or several that are packed.
            timestep: Timestep of the denoising. It is read if masks or their plans depend on it and the clock's
                framework does not say the step: once for all views of one schedule, see `first_value`.
            cfg_branch: Number of this pass within its step, if the framework gives it.
        """
        self._videos = tuple(videos)
        counts = self.count_steps or self.clock.shared or self.source.changes != "never" or self.schedule.by_step
        if timestep is None or not counts:
            return self.predicts
        last, self.moment = self.moment, self.clock.advance(lambda: first_value(timestep), cfg_branch)
        return self.predicts and self.moment.generation != last.generation

    def grid(self) -> BlockGrid:
        """Returns the source's grid for this pass. Raises ValueError for a size that the source rejects."""
        return BlockGrid.packed([self.source.grid(request) for request in self._requests(0)])

    def pass_key(self) -> Hashable:
        """Returns what this pass's cache keys depend on, but for its videos: dense layers; the step, if masks do."""
        dense = tuple(filter(self._is_dense, range(self.layers)))
        return dense, self.moment if self.source.changes == "per_step" else None

    def cache_key(self, layer: int) -> Hashable | None:
        """Returns a key that is equal for equal masks of this layer now, or None if the mask is predicted."""
        if self._is_dense(layer):
            return DENSE
        return None if self.predicts else tuple(self.source.cache_key(request) for request in self._requests(layer))

    def mask(self, layer: int, tokens: LocalQK | None = None) -> BlockMask:
        """Returns the mask of this layer now. Collective if it is predicted from `tokens`: identical on all ranks.

        Raises:
            ValueError: For a request that does not fit the source; where masks are predicted, on every rank.
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
            raise UserError(f"the mask source gave {mask.heads} heads, the model has {self.heads}")
        return mask

    def _is_dense(self, layer: int) -> bool:
        if self.schedule == _NOTHING_DENSE:
            return False
        steps = self.steps() if self.schedule.last_steps else None
        return self.schedule.is_dense(layer, self.layers, self.moment.step, steps)

    def _requests(self, layer: int) -> list[MaskRequest]:
        """Returns one for each video."""
        step, branch = self.moment.step, self.moment.cfg_branch
        return [
            MaskRequest(layer, self.heads, video.thw, video.text, step, branch, self.layers, video.text_runs)
            for video in self._videos
        ]
