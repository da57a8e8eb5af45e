"""Mask of each attention of a transformer: the source's, or a dense one if the schedule says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import DenoisingStep, DenseSchedule, StepClock, first_value
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource, parts_of
from dbsp_core.sources.base import packed_mask
from dbsp_core.utils.errors import UserError, fingerprint_of

DENSE = "dense by schedule"
"""Cache key of the mask of a layer that the schedule makes dense."""
_MOST_KEYED = 1024
"""Sizes, steps and CFG passes whose masks' cache keys are kept. Ranks compare those that are new."""

_Moment = tuple[tuple[Video, ...], tuple[int, ...], DenoisingStep]
"""Videos of a forward pass, its dense layers, and its step and CFG pass."""


@dataclass
class MaskProvider:
    """One transformer's masks. The same answers on every rank, and in the single process that they are compared with.

    Attributes:
        steps: Returns the number of denoising steps, if a framework knows it.
        count_steps: True to keep `moment` also if no mask depends on it.
        names: The cache key of each layer's mask in the current forward pass; None where it is predicted.
        predicts: True if masks are predicted from q and k, at every call.
        changing: True if a layer has other masks in other denoising steps, apart from dense ones.
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
    names: dict[int, Hashable] = field(default_factory=dict)
    predicts: bool = field(init=False)
    changing: bool = field(init=False)
    _known: OrderedDict[_Moment, dict[int, Hashable]] = field(default_factory=OrderedDict)
    """Names for the videos and moments that they were asked for last."""
    _numbers: dict[tuple[Video, ...], dict[Hashable, int]] = field(default_factory=dict)
    """Numbers of cache keys, in the order in which they were first given for these videos."""

    def __post_init__(self) -> None:
        self.predicts = self.source.changes == "per_call"
        self.changing = self.source.changes != "never"

    @property
    def by_step(self) -> bool:
        """True if masks depend on the denoising step."""
        return self.schedule.by_step or any(part.changes == "per_step" for part in parts_of(self.source))

    def begin(
        self, videos: Sequence[Video], timestep: torch.Tensor | float | None, cfg_branch: int | None = None
    ) -> bool:
        """Starts a forward pass. Returns True if it is known to be this transformer's first in a generation.

        Args:
            videos: One, or several that are packed.
            timestep: Timestep of the denoising. It is read if masks or their plans depend on it and the clock's
                framework does not say the step: once for all views of one schedule, see `first_value`.
            cfg_branch: Number of this pass within its step, if the framework gives it.
        """
        self._videos, self.names = tuple(videos), {}
        counts = self.count_steps or self.clock.shared or self.source.changes != "never" or self.schedule.by_step
        if timestep is None or not counts:
            return False
        last, self.moment = self.moment, self.clock.advance(lambda: first_value(timestep), cfg_branch)
        return self.moment.generation != last.generation

    def grid(self) -> BlockGrid:
        """Returns the source's grid for this pass. Raises ValueError for a size that the source rejects."""
        return self._grid(self._requests(0))

    def use_names(self) -> bool:
        """Takes the names of this forward pass from an earlier one. Returns False if `ask_names` is needed."""
        now = self._now
        if self.predicts and self._schedule_is_known:
            self.names = {layer: DENSE if layer in now[1] else None for layer in range(self.layers)}
        else:
            self.names = self._known.get(now, {})
        return self.predicts or bool(self.names)

    def ask_names(self) -> dict[int, Hashable]:
        """Asks the source for the names of this forward pass."""
        self.names = {layer: self.cache_key(layer) for layer in range(self.layers)}
        return self.names

    def fingerprint(self, names: dict[int, Hashable]) -> int:
        """Returns a number that is equal on ranks that have seen the same keys, of any kind, in the same order.

        Ranks of which one has a mask and another has not would wait for one another in vain.
        """
        numbers = dict(self._numbers.get(self._videos, {}))
        return fingerprint_of([numbers.setdefault(key, len(numbers)) for key in names.values()])

    def keep_names(self, names: dict[int, Hashable]) -> None:
        """Keeps the names of this forward pass, once all ranks have compared them."""
        self._known[self._now] = names
        if len(self._known) > _MOST_KEYED:
            self._known.popitem(last=False)
        numbers = self._numbers.setdefault(self._videos, {})
        for key in names.values():
            numbers.setdefault(key, len(numbers))

    def forget(self, videos: tuple[Video, ...]) -> None:
        """Drops what is known of a size, once nothing that is prepared for its masks is kept."""
        self._numbers.pop(videos, None)
        for now in [now for now in self._known if now[0] == videos]:
            del self._known[now]

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
        requests = self._requests(layer)
        if self._is_dense(layer):
            return BlockMask.dense(self.heads, self._grid(requests))
        local_qk = (tokens,) if self.predicts else ()
        if len(requests) == 1:
            mask = self.source.mask(requests[0], *local_qk)
        else:
            sources = [(self.source.grid(request), self.source) for request in requests]
            mask = packed_mask(sources, requests[0], *local_qk)
        if mask.heads != self.heads and not self.predicts:
            raise UserError(f"the mask source gave {mask.heads} heads, the model has {self.heads}")
        return mask

    @property
    def _schedule_is_known(self) -> bool:
        """False if asking which layers are dense raises, on all ranks."""
        return self.schedule.last_steps == 0 or self.steps() is not None

    @property
    def _now(self) -> _Moment:
        """Everything that names depend on: the videos, the dense layers, and the step if masks change by it."""
        dense = tuple(filter(self._is_dense, range(self.layers))) if self._schedule_is_known else ()
        by_step = any(part.changes == "per_step" for part in parts_of(self.source))
        return self._videos, dense, self.moment if by_step else DenoisingStep()

    def _is_dense(self, layer: int) -> bool:
        steps = self.steps() if self.schedule.last_steps else None
        return self.schedule.is_dense(layer, self.layers, self.moment.step, steps)

    def _grid(self, requests: Sequence[MaskRequest]) -> BlockGrid:
        return BlockGrid.packed([self.source.grid(request) for request in requests])

    def _requests(self, layer: int) -> list[MaskRequest]:
        """Returns one for each video."""
        step, branch = self.moment.step, self.moment.cfg_branch
        return [
            MaskRequest(layer, self.heads, video.thw, video.text, step, branch, self.layers, video.text_runs)
            for video in self._videos
        ]
