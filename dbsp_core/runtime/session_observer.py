"""Observers of a session."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.reuse import PlanUse
from dbsp_core.runtime.prepared import PreparedAttention


class SessionObserver:
    """Observer of a session; methods do nothing unless overridden."""

    compares = False  # True to compare plans with the contiguous plan
    counts_steps = False  # True to count denoising steps even if masks do not depend on them

    def begin(
        self, step: DenoisingStep, timestep: torch.Tensor | float | None, cfg_branch: int | None, index: int | None
    ) -> None:
        """Called at the start of a forward pass, with the framework's timestep, CFG pass and step index."""

    def mask_made(self, key: Hashable, layer: int, mask: BlockMask, lasting: bool) -> None:
        """Called for a new mask. `key` identifies it in `mask_used`, until another mask is made with this key.

        `lasting`: True if it may be reused in later passes or other layers.
        """

    def mask_used(self, layer: int, key: Hashable) -> None:
        """Called before a layer's attention uses the mask of this key."""

    def attention_begins(self, device: torch.device) -> None:
        """Called before an attention on this device is planned and computed."""

    def attention_ends(self, layer: int, prepared: PreparedAttention, q: torch.Tensor, use: PlanUse) -> None:
        """Called after an attention of q [B, H, shard, D] is computed or queued on its device.

        `use` is its plan; `use.counted` is set once the session's `flush` returns.
        """

    def pass_ends(self, first_layer: int, skipped: int, attentions: int) -> None:
        """Called after a forward pass in which a step cache skipped some of a session's attentions."""
