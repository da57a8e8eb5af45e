"""Dense masks, and masks from files: by layer, or by step group, layer and head as in PAROAttention."""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch.distributed as dist

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_file import MaskFile
from dbsp_core.sources.base import BlockSizes, Changes, MaskRequest
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, require_value
from dbsp_core.utils.files import user_path


@dataclass(frozen=True)
class StoredMasks:
    """Base of sources that read the mask file at `path` (see docs/mask-files.md).

    A bad file is rejected when the source is made. A missing file, and with several ranks any bad file, is rejected on
    all ranks when a session is made.
    """

    path: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise SettingError(
                "this mask source reads a file and needs a path, for example {source: file, path: masks.safetensors}",
                ("path",),
            )
        if dist.is_available() and dist.is_initialized():
            return
        with blame_setting("path"):
            try:
                os.stat(user_path(self.path))
            except (FileNotFoundError, NotADirectoryError):
                return
            except (OSError, ValueError):
                pass  # reading it raises a better error
            self._file  # noqa: B018

    @cached_property
    def _file(self) -> MaskFile:
        return MaskFile(self.path)

    @property
    def block_q(self) -> int:
        return self._file.grid.block_q

    @property
    def block_k(self) -> int:
        return self._file.grid.block_k

    def grid(self, request: MaskRequest) -> BlockGrid:
        """Returns the file's grid in canonical order. Raises UserError if the file is for another model or video."""
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


@dataclass(frozen=True)
class DenseSource(BlockSizes):
    """Dense attention."""

    def mask(self, request: MaskRequest) -> BlockMask:
        return BlockMask.dense(request.heads, self.grid(request))


@dataclass(frozen=True)
class FileSource(StoredMasks):
    """Masks from a file with one mask per layer or one for all layers, without step groups."""

    changes: ClassVar[Changes] = "never"

    def grid(self, request: MaskRequest) -> BlockGrid:
        if self._file.groups is not None:
            raise UserError(
                f"mask file {self.path} has masks for step groups {self._file.groups}; read it with mask "
                "source 'paro' ({source: paro, path: …})"
            )
        return super().grid(request)

    def cache_key(self, request: MaskRequest) -> Hashable:
        return request.layer if self._file.per_layer else "all layers"

    def mask(self, request: MaskRequest) -> BlockMask:
        self.grid(request)
        return self._file.layer(request.layer)


@dataclass(frozen=True)
class ParoSource(StoredMasks):
    """Masks from a file with or without step groups; rows and columns of text are made dense.

    Attributes:
        dense_steps: Number of first steps that are dense. None: all steps before the file's first group.
    """

    dense_steps: int | None = None
    changes: ClassVar[Changes] = "per_step"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_value(self, "dense_steps", (self.dense_steps or 0) >= 0, "must not be negative")

    def cache_key(self, request: MaskRequest) -> Hashable:
        try:
            group = self._group(request.step)
        except UserError:  # `mask` raises it on all ranks
            return "beyond the last group", request.step
        return "dense" if group is None else (group, request.layer if self._file.per_layer else "all layers")

    def mask(self, request: MaskRequest) -> BlockMask:
        grid, group = self.grid(request), self._group(request.step)
        if group is None:
            return BlockMask.dense(request.heads, grid)
        mask = self._file.layer(request.layer, group)
        bits = mask.bits.clone()
        grid.make_text_dense(bits)
        return replace(mask, bits=bits)

    def _group(self, step: int) -> int | None:
        """Returns the step group, or None for a dense step. Raises UserError after the last group."""
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
