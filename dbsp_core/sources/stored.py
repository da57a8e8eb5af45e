"""What sources that read a mask file share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from dbsp_core.errors import SettingError, UserError, blaming
from dbsp_core.grid import BlockGrid
from dbsp_core.mask_file import MaskFile
from dbsp_core.sources.base import MaskRequest

__all__ = ["StoredMasks"]


@dataclass(frozen=True)
class StoredMasks:
    """path: a mask file (see docs/mask-files.md).

    A bad file is found out at once. Only where ranks have joined already it is left to `grid`, at the first forward
    pass: there all ranks raise together, also when the file is bad on one of them.
    """

    path: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise SettingError(
                "this mask source reads a file and needs a path, for example {source: file, path: masks.safetensors}",
                ("path",),
            )
        if not (dist.is_available() and dist.is_initialized()):
            with blaming("path"):
                self._file  # noqa: B018

    @cached_property
    def _file(self) -> MaskFile:
        return MaskFile(self.path)

    def grid(self, request: MaskRequest) -> BlockGrid:
        """The file's grid in canonical order. Raises ValueError when the file is for another model or video."""
        file, grid = self._file, self._file.grid
        if (grid.tokens, grid.text_tokens, file.heads) != (request.tokens, request.text_tokens, request.heads):
            raise UserError(
                f"mask file {self.path} is for {file.heads} heads and {grid.tokens} tokens ({grid.text_tokens} "
                f"of text), the model runs {request.heads} heads and {request.tokens} tokens ({request.text_tokens} "
                "of text); use a mask made for this model, resolution and number of frames"
            )
        if grid.thw not in (None, request.thw):
            raise UserError(
                f"mask file {self.path} is for a token grid of {grid.thw}, the video's is {request.thw}; use a mask "
                "made for this resolution and number of frames"
            )
        if file.per_layer and request.layers not in (None, file.layers):
            raise UserError(
                f"mask file {self.path} is for {file.layers} layers, the model has {request.layers}; use a mask made "
                "for this model"
            )
        return grid
