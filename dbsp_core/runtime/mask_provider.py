"""Which mask each attention of a transformer gets: the source's, or a dense one where the schedule says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid, Video
from dbsp_core.masks.steps import DenoisingStep, DenseSchedule, StepClock, first_value
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource, parts_of
from dbsp_core.sources.base import packed_mask
from dbsp_core.utils.errors import UserError, fingerprint_of

__all__ = ["MaskProvider"]

_DENSE = "dense by schedule"
_MOST_KEYED = 1024
"""Sizes, steps and guidance passes whose masks' cache keys are kept. Ranks compare those that are new."""

_Moment = tuple[tuple[Video, ...], tuple[int, ...], DenoisingStep]
"""Videos of a forward pass, its dense layers, and its step and guidance pass."""


@dataclass
class MaskProvider:
    """One transformer's masks. The same answers on every rank, and in the single process that they are compared with.

    Attributes:
        steps: Tells how many denoising steps there will be, where a host knows.
        count_steps: Whether to keep `moment` also where no mask depends on it.
    """

    source: MaskSource
    schedule: DenseSchedule
    heads: int
    layers: int
    group: SequenceGroup
    steps: Callable[[], int | None] = lambda: None
    count_steps: bool = False
    clock: StepClock = field(default_factory=StepClock)
    moment: DenoisingStep = field(default_factory=DenoisingStep)
    _videos: tuple[Video, ...] = ()
    """Videos of the current forward pass: several are packed, in this order, and none attends to another."""
    _keys: OrderedDict[_Moment, dict[int, Hashable]] = field(default_factory=OrderedDict)
    """Cache keys by layer, for the videos and moments that they were asked for last."""
    _named: dict[int, Hashable] = field(default_factory=dict)
    """Those of the current forward pass."""
    _numbers: dict[tuple[Video, ...], dict[Hashable, int]] = field(default_factory=dict)
    """Numbers of cache keys, in the order in which they were first given for these videos."""

    @property
    def _predicted(self) -> bool:
        return self.source.changes == "per_call"

    def begin(
        self,
        videos: Sequence[Video],
        timestep: torch.Tensor | float | None,
        cfg_branch: int | None = None,
    ) -> None:
        """Starts a forward pass.

        Args:
            videos: One, or several that are packed.
            timestep: Timestep of the denoising. It is read if masks or their plans depend on it and the clock's host
                does not say the step: once for all views of one schedule, see `first_value`.
            cfg_branch: Number of this pass within its step, where the host says it.
        """
        self._videos, self._named = tuple(videos), {}
        counts = self.count_steps or self.clock.shared or self.source.changes != "never" or self.schedule.by_step
        if timestep is not None and counts:
            self.moment = self.clock.advance(lambda: first_value(timestep), cfg_branch)

    def grid(self) -> BlockGrid:
        """The source's grid for this pass. Collective: what the source refuses on one rank is refused on all."""
        return run_consistently(
            self._control, lambda: self._grid(self._requests(0)), fingerprint_of, "the video's block grid"
        )

    @property
    def _control(self) -> SequenceGroup:
        """The ranks in a group of the host's memory, in which they compare without waiting for a device."""
        return self.group.control()

    def name_masks(self) -> None:
        """Asks the source for the cache keys of this forward pass, unless it was asked before.

        Collective then: what one rank raises, all raise, and also where masks that are new to one rank are known to
        another. Such ranks would wait for one another in vain.
        """
        if self._predicted:
            return
        now = self._now
        if now not in self._keys:
            self._keys[now] = self._compared_keys()
            if len(self._keys) > _MOST_KEYED:
                self._keys.popitem(last=False)
        self._named = self._keys[now]

    def _compared_keys(self) -> dict[int, Hashable]:
        """Returns the cache keys of the layers that are not dense now. Collective."""

        def ask() -> dict[int, Hashable]:
            layers = (layer for layer in range(self.layers) if not self._is_dense(layer))
            return {layer: self._static_key(layer) for layer in layers}

        def in_numbers(keys: dict[int, Hashable]) -> int:
            """Equal on ranks that have seen the same keys, of any kind, in the same order."""
            known = self._numbers.setdefault(self._videos, {})
            return fingerprint_of([known.setdefault(key, len(known)) for key in keys.values()])

        return run_consistently(self._control, ask, in_numbers, "which masks are new")

    def forget(self, videos: tuple[Video, ...]) -> None:
        """Drops what is known of a size, once no executor for its masks is kept."""
        self._numbers.pop(videos, None)
        for now in [now for now in self._keys if now[0] == videos]:
            del self._keys[now]

    def changes(self, layer: int) -> bool:
        """Whether this layer will have other masks, in other denoising steps."""
        return self.source.changes != "never" and not self._is_dense(layer)

    @property
    def _now(self) -> _Moment:
        """Everything that cache keys depend on: the videos, the dense layers, and the step if masks change by it."""
        known = self.schedule.last_steps == 0 or self.steps() is not None  # if not, asking raises it on all ranks
        dense = tuple(filter(self._is_dense, range(self.layers))) if known else ()
        by_step = any(part.changes == "per_step" for part in parts_of(self.source))
        return self._videos, dense, self.moment if by_step else DenoisingStep()

    @property
    def by_step(self) -> bool:
        """Whether masks depend on the denoising step."""
        return self.schedule.by_step or any(part.changes == "per_step" for part in parts_of(self.source))

    def cache_key(self, layer: int) -> Hashable | None:
        """Equal keys are equal masks of this layer now. None where the mask is predicted from q and k."""
        if self._is_dense(layer):
            return _DENSE
        if self._predicted:
            return None
        return (self._named[layer] if layer in self._named else self._static_key(layer),)

    def mask(self, layer: int, tokens: LocalQK) -> BlockMask:
        """The mask of this layer now. Collective: the same bits on every rank, or ValueError on every rank."""
        requests = self._requests(layer)
        if self._is_dense(layer):
            return BlockMask.dense(self.heads, self._grid(requests))
        if not self._predicted:
            return self._agreed(layer)
        return self.source.mask(requests[0], tokens) if len(requests) == 1 else self._packed(requests, tokens)

    def _agreed(self, layer: int) -> BlockMask:
        """The mask of this layer from a static source. Collective."""

        def make() -> BlockMask:
            requests = self._requests(layer)
            mask = self.source.mask(requests[0]) if len(requests) == 1 else self._packed(requests)
            if mask.heads != self.heads:
                raise UserError(f"the mask source gave {mask.heads} heads, the model has {self.heads}")
            return mask

        return run_consistently(self._control, make, lambda mask: mask.fingerprint, f"the mask of layer {layer}")

    def _is_dense(self, layer: int) -> bool:
        steps = self.steps() if self.schedule.last_steps else None
        return self.schedule.is_dense(layer, self.layers, self.moment.step, steps)

    def _static_key(self, layer: int) -> Hashable:
        keys = tuple(self.source.cache_key(request) for request in self._requests(layer))
        return keys if len(keys) > 1 else keys[0]

    def _grid(self, requests: Sequence[MaskRequest]) -> BlockGrid:
        return BlockGrid.packed([self.source.grid(request) for request in requests])

    def _packed(self, requests: Sequence[MaskRequest], tokens: LocalQK | None = None) -> BlockMask:
        return packed_mask([(self.source.grid(request), self.source) for request in requests], requests[0], tokens)

    def _requests(self, layer: int) -> list[MaskRequest]:
        """One for each video."""
        now = self.moment
        return [
            MaskRequest(layer, self.heads, *video, now.step, now.cfg_branch, self.layers) for video in self._videos
        ]
