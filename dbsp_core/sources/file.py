"""Masks from a mask file."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from dbsp_core.grid import BlockGrid
from dbsp_core.mask import BlockMask, MaskFile
from dbsp_core.sources.base import HomeTokens, MaskRequest, Varies

__all__ = ["FileSource"]


@dataclass(frozen=True)
class FileSource:
    """path: a mask file (see `dbsp_core.MaskFile`), with one mask per layer or one for all."""

    path: str = ""
    varies: ClassVar[Varies] = "never"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("mask source 'file' needs a path, for example {source: file, path: masks.safetensors}")
        self._file  # noqa: B018  a bad file is found out at once, not at the first attention

    @cached_property
    def _file(self) -> MaskFile:
        return MaskFile(self.path)

    def grid(self, request: MaskRequest) -> BlockGrid:
        grid = self._file.grid
        if (grid.tokens, grid.text_tokens, self._file.heads) != (request.tokens, request.text_tokens, request.heads):
            raise ValueError(
                f"mask file {self.path} is for {self._file.heads} heads and {grid.tokens} tokens ({grid.text_tokens} "
                f"of text), the model runs {request.heads} heads and {request.tokens} tokens ({request.text_tokens} "
                "of text); use a mask made for this model, resolution and number of frames"
            )
        return grid

    def version(self, request: MaskRequest) -> Hashable:
        return request.layer if self._file.per_layer else "all layers"

    def mask(self, request: MaskRequest, tokens: HomeTokens | None = None) -> BlockMask:
        self.grid(request)
        return self._file.layer(request.layer)
