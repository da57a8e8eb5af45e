"""Which mask each attention of a transformer gets: the source's, or a dense one where the schedule says so."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import torch

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.schedule import DenoisingStep, DenseSchedule, StepCounter
from dbsp_core.sources import LocalQK, MaskRequest, MaskSource
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["MaskProvider"]

_DENSE = "dense by schedule"
_MOST_NAMED = 8
"""Videos and moments whose masks' names are kept: sizes of text take turns in guidance."""


@dataclass
class MaskProvider:
    """One transformer's masks. The same answers on every rank, and in the single process that they are compared with.

    steps:       tells how many denoising steps there will be, where a host knows
    count_steps: whether to keep `moment` also where no mask depends on it
    generation:  gives an object that is another one for each generation, where a host has one
    """

    source: MaskSource
    schedule: DenseSchedule
    heads: int
    layers: int
    group: SequenceGroup
    steps: Callable[[], int | None] = lambda: None
    count_steps: bool = False
    generation: Callable[[], object] = lambda: None
    moment: DenoisingStep = field(default_factory=DenoisingStep)
    _counter: StepCounter = field(default_factory=StepCounter)
    _last_generation: object = None
    _thw: tuple[int, int, int] = (0, 0, 0)
    _text_tokens: int = 0
    _named: OrderedDict[Hashable, dict[int, Hashable]] = field(default_factory=OrderedDict)
    """The masks' names by layer, for the videos and moments that they were asked for last."""
    _numbers: dict[Hashable, int] = field(default_factory=dict)
    """By name, in the order in which it was first given."""

    def begin(
        self,
        thw: tuple[int, int, int],
        text_tokens: int,
        timestep: torch.Tensor | float | None,
        branch: int | None = None,
    ) -> None:
        """Starts a forward pass.

        timestep: of the denoising; read (a host synchronisation) where masks or their plans depend on it
        branch:   of a step's passes, where the host says which one this is
        """
        self._thw, self._text_tokens = thw, text_tokens
        if timestep is not None and (self.count_steps or self.source.varies != "never" or self.schedule.by_step):
            generation = self.generation()
            if generation is not self._last_generation:
                # The last one may have failed at the step with which this one begins.
                self._last_generation, self._counter = generation, StepCounter()
            first = timestep.reshape(-1)[0] if isinstance(timestep, torch.Tensor) else timestep
            self.moment = self._counter.advance(float(first), branch)

    def grid(self, device: torch.device) -> BlockGrid:
        """The source's grid for this video. Collective: what the source refuses on one rank is refused on all."""
        return run_consistently(
            self.group, lambda: self.source.grid(self._request(0)), device, fingerprint_of, "the video's block grid"
        )

    def name_masks(self, device: torch.device) -> None:
        """Asks the source what the masks of this forward pass are called, unless it was asked before.

        Collective then: what one rank raises, all raise, and also where masks that are new to one rank are known to
        another. Such ranks would wait for one another in vain.
        """
        if self.source.varies == "calls" or self._naming in self._named:
            return
        names = run_consistently(self.group, self._versions, device, self._in_numbers, "which masks are new")
        self._named[self._naming] = names
        if len(self._named) > _MOST_NAMED:
            self._named.popitem(last=False)

    def _in_numbers(self, names: dict[int, Hashable]) -> int:
        """Equal on ranks that have seen the same names, whatever they are, in the same order."""
        return fingerprint_of([self._numbers.setdefault(name, len(self._numbers)) for name in names.values()])

    def changes(self, layer: int) -> bool:
        """Whether this layer will have other masks, in other denoising steps."""
        return self.source.varies != "never" and not self._is_dense(layer)

    @property
    def _naming(self) -> Hashable:
        """What the names of masks depend on."""
        depends = self.source.varies == "steps" or self.schedule.by_step
        return self._thw, self._text_tokens, self.moment if depends else DenoisingStep()

    def _versions(self) -> dict[int, Hashable]:
        layers = (layer for layer in range(self.layers) if not self._is_dense(layer))
        return {layer: self.source.version(self._request(layer)) for layer in layers}

    def version(self, layer: int) -> Hashable | None:
        """Names the mask of this layer now: equal versions are equal masks. None where it is computed from q and k."""
        if self._is_dense(layer):
            return _DENSE
        if self.source.varies == "calls":
            return None
        names = self._named.get(self._naming, {})
        return (names[layer] if layer in names else self.source.version(self._request(layer)),)

    def mask(self, layer: int, tokens: LocalQK) -> BlockMask:
        """The mask of this layer now. Collective: the same bits on every rank, or ValueError on every rank."""
        request = self._request(layer)
        if self._is_dense(layer):
            return BlockMask.dense(self.heads, self.source.grid(request))
        if self.source.varies == "calls":
            return self.source.mask(request, tokens)
        return self._agreed(layer, tokens.q.device)

    def static_masks(self, device: torch.device) -> list[BlockMask] | None:
        """The source's masks of all layers; None where they are not known before they are used.

        Collective, like `mask`, before the first of them is used: home layouts made from them must be equal too.
        """
        if self.source.varies != "never":
            return None
        versions = [self.source.version(self._request(layer)) for layer in range(self.layers)]
        masks = {version: self._agreed(versions.index(version), device) for version in dict.fromkeys(versions)}
        return [masks[version] for version in versions]

    def _agreed(self, layer: int, device: torch.device) -> BlockMask:
        """The mask of this layer from a source that does not look at q and k. Collective."""
        return run_consistently(
            self.group,
            lambda: self._fitting(self.source.mask(self._request(layer))),
            device,
            lambda mask: mask.fingerprint,
            f"the mask of layer {layer}",
        )

    def _is_dense(self, layer: int) -> bool:
        return self.schedule.is_dense(
            layer, self.layers, self.moment.step, self.steps() if self.schedule.last_steps else None
        )

    def _request(self, layer: int) -> MaskRequest:
        now = self.moment
        return MaskRequest(layer, self.heads, self._thw, self._text_tokens, now.step, now.branch, self.layers)

    def _fitting(self, mask: BlockMask) -> BlockMask:
        if mask.heads != self.heads:
            raise UserError(f"the mask source gave {mask.heads} heads, the model has {self.heads}")
        return mask
