"""Masks from a mask file, the same in every denoising step."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from dbsp_core.errors import UserError
from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask
from dbsp_core.sources.base import HomeTokens, MaskRequest, Varies
from dbsp_core.sources.stored import StoredMasks

__all__ = ["FileSource"]


@dataclass(frozen=True)
class FileSource(StoredMasks):
    """path: a mask file with one mask per layer or one for all, and no step groups."""

    varies: ClassVar[Varies] = "never"

    def grid(self, request: MaskRequest) -> BlockGrid:
        if self._file.groups is not None:
            raise UserError(
                f"mask file {self.path} has masks for step groups {self._file.groups}; read it with mask "
                "source 'paro' ({source: paro, path: …})"
            )
        return super().grid(request)

    def version(self, request: MaskRequest) -> Hashable:
        return request.layer if self._file.per_layer else "all layers"

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        self.grid(request)
        return self._file.layer(request.layer)
