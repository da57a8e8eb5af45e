"""Observers of a session."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.reuse import PlanUse
from dbsp_core.runtime.prepared import PreparedAttention


class SessionObserver:
    """Observer of a session; each method does nothing unless it is overridden.

    Attributes:
        compares: True if plans must be compared with the contiguous plan.
        counts_steps: True if denoising steps must be distinguished, also if masks don't depend on them.
    """

    compares = False
    counts_steps = False

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Observes the start of a forward pass. timestep, cfg_branch and index (of the step) are the framework's."""

    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        """Observes a new mask.

        Args:
            key: By which `mask_used` will name it, until another is made with that key.
            lasting: True if it may be used in later passes, or for other layers, without being made again.
        """

    def mask_used(self, layer: int, key: Hashable) -> None:
        """Observes that a layer's attention is about to use the mask of this key."""

    def attention_begins(self, device: torch.device) -> None:
        """Observes that an attention on this device will be planned and computed."""

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        """Observes that an attention of q [B, H, shard, D] was computed, or queued on its device.

        Args:
            use: Its plan. `use.counted` is set by the time the session's `flush` returns.
        """
