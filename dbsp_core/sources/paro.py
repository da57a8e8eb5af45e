"""Static masks by step group, layer and head, each head in a token order of its own, as PAROAttention has them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch

from dbsp_core.errors import UserError, bad_value
from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import HomeTokens, MaskRequest, Varies
from dbsp_core.sources.stored import StoredMasks

__all__ = ["ParoSource"]


@dataclass(frozen=True)
class ParoSource(StoredMasks):
    """path: a mask file; without step groups, its masks hold for all steps. Rows and columns of text are made dense.

    dense_steps: so many leading steps are dense; None: those before the file's first group
    """

    dense_steps: int | None = None
    varies: ClassVar[Varies] = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_steps is not None and self.dense_steps < 0:
            raise bad_value(self, "dense_steps", "must not be negative")

    def version(self, request: MaskRequest) -> Hashable:
        try:
            group = self._group(request.step)
        except UserError:  # `mask` raises it, on all ranks together
            return "beyond the last group", request.step
        return "dense" if group is None else (group, request.layer if self._file.per_layer else "all layers")

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        grid, group = self.grid(request), self._group(request.step)
        if group is None:
            return BlockMask.dense(request.heads, grid)
        mask = self._file.layer(request.layer, group)
        bits = mask.bits.clone()
        bits[:, torch.from_numpy(grid.q_axis.starts < grid.text_tokens)] = True
        bits[:, :, torch.from_numpy(grid.k_axis.starts < grid.text_tokens)] = True
        return BlockMask(bits, mask.grid)

    def _group(self, step: int) -> int | None:
        """The step group; None for a dense step. Raises ValueError beyond the last group."""
        if self.dense_steps is not None and step < self.dense_steps:
            return None
        groups = self._file.groups
        if groups is None:
            return 0
        try:
            return groups.find(step if self.dense_steps is None else max(step, groups.starts[0]))
        except UserError as error:
            raise UserError(
                f"mask file {self.path} {error}; run fewer steps, or convert the masks with --groups that reach "
                "further ('…,25-' has no end)"
            ) from error
