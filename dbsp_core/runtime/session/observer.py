"""What may watch a session from outside: reports and recordings implement it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.schedule import DenoisingStep
from dbsp_core.planning.plan import Plan
from dbsp_core.runtime.executor import AttentionExecutor

__all__ = ["AttentionEnded", "SessionObserver"]


@dataclass(frozen=True, eq=False)
class AttentionEnded:
    """An attention that was computed, or queued on its device.

    Attributes:
        key: The key of its plan.
        q: float[B, H, shard, D], this rank's queries.
        latest: Plans by key, with the numbers of the masks that were counted last.
        asynchronous: Whether its own mask is still being counted: then the executor's plan has the last mask's
            numbers, and `latest` has this one's once the next attention of the same key has begun.
    """

    layer: int
    key: Hashable
    executor: AttentionExecutor
    q: torch.Tensor
    latest: Mapping[Hashable, Plan]
    asynchronous: bool


class SessionObserver:
    """Is told what a session does; each method does nothing unless it is overridden.

    Attributes:
        compares: Whether plans must tell what the contiguous plan would do.
        counts_steps: Whether denoising steps must be distinguished, also where masks don't depend on them.
    """

    compares = False
    counts_steps = False

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """A forward pass begins. timestep, cfg_branch (guidance pass), index (of the step): as the host gave them"""

    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        """A mask was made.

        Args:
            key: By which `mask_used` will name it, until another is made with that key.
            lasting: Whether it may be used in later passes, or for other layers, without being made again.
        """

    def mask_used(self, layer: int, key: Hashable) -> None:
        """A layer's attention is about to use the mask of this key."""

    def attention_begins(self, device: torch.device) -> None:
        """An attention on this device will be planned and computed."""

    def attention_ends(self, ended: AttentionEnded) -> None:
        """An attention was computed, or queued on its device."""

    def flush(self, latest: Mapping[Hashable, Plan]) -> None:
        """All masks up to now have been counted."""
