"""Reads tensors in other projects' files without unpickling, and fits their blocks to db-SP's grids."""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.mask_file import block_counts
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file, user_path

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")
_PLAIN = "save plain tensors, in mappings at most: torch.save({'sparse': masks}, path)"


def read_tensors(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Returns every dense tensor in a file by name: "" for a single tensor, "a/b" in nested mappings, "a/0" in lists.

    Nothing is unpickled. Files are memory-mapped if their format allows it.
    """
    path = user_path(path)
    require_file(path, "file", "give the path of a file with masks")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} has an unknown suffix; masks are read from {', '.join(SUFFIXES)}")
    try:
        content: Any
        if path.suffix == ".safetensors":
            content = load_file(path)
        elif path.suffix == ".npy":
            content = torch.from_numpy(np.load(path, allow_pickle=False, mmap_mode="c"))
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            content = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind in "biufc"}
        else:
            can_map = zipfile.is_zipfile(path)  # older files are not archives
            if can_map:
                with zipfile.ZipFile(path) as archive:
                    can_map = all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=can_map)
    except Exception as error:  # damaged files may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read without unpickling objects, or is damaged ({reason}); {_PLAIN}"
        ) from error
    tensors = dict(_named_tensors(content))
    if not tensors:
        raise UserError(f"{path} has no dense tensors in it that can be read without unpickling objects; {_PLAIN}")
    return tensors


def _named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(content, torch.Tensor):
        if content.layout == torch.strided and not content.is_quantized and content.device.type == "cpu":
            yield name, content
    elif isinstance(content, (Mapping, list, tuple)):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _named_tensors(value, f"{name}/{key}" if name else str(key))


def stacked(tensors: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], tuple[int, ...]] | None:
    """Returns one tensor […, H, nq, nk], or joins the layers' tensors [H, nq, nk] or [1, H, nq, nk].

    The names of layers' tensors must differ in one number from 0 to L − 1. Returns the tensors in order, and their
    joint shape; None if it is not clear how to join them.
    """
    # 1. One tensor
    shapes = {tuple(tensor.shape) for tensor in tensors.values()}
    if len(tensors) == 1:
        return [*tensors.values()], shapes.pop()
    # 2. The part in which names differ
    words = [re.split(r"(\d+)", name) for name in tensors]
    if len({len(parts) for parts in words}) != 1 or len(shapes) != 1:
        return None
    differing = [column for column in zip(*words, strict=True) if len({*column}) > 1]
    if len(differing) != 1 or not all(number.isdecimal() for number in differing[0]):
        return None
    # 3. Layers by this number
    shape, numbers = shapes.pop(), [int(number) for number in differing[0]]
    if sorted(numbers) != list(range(len(tensors))) or math.prod(shape[:-3]) != 1:
        return None
    layers = dict(zip(numbers, tensors.values(), strict=True))
    return [layers[layer] for layer in range(len(layers))], (len(layers), *shape[-3:])


@dataclass(frozen=True)
class ForeignBlocks:
    """Convention by which masks divide tokens into blocks."""

    grid: BlockGrid
    joined: bool  # True if blocks continue from text into video, so that one may hold both; False: separate blocks
    text: bool = True  # True if masks include blocks of text; False: video only

    @classmethod
    def find(cls, rows: int, columns: int | None, grid: BlockGrid, joined: bool | None = None) -> ForeignBlocks:
        """Determines how masks with these rows and columns (None: unknown) count blocks, as `joined` if given.

        Raises UserError if no way fits, or two do; the message names an option.
        """
        aligned = grid.text_tokens % grid.block_q == 0 and grid.text_tokens % grid.block_k == 0
        joinings = (False,) if aligned else (False, True) if joined is None else (joined,)
        kinds = (True, False) if grid.text_tokens else (True,)
        readings = [cls(grid, choice, text) for choice, text in itertools.product(joinings, kinds)]
        fitting = [r for r in readings if rows == r.shape[0] and columns in (None, r.shape[1])]
        if len(fitting) > 1:
            raise UserError(
                f"{rows} rows of blocks could be {' or '.join(map(str, fitting))}; set "
                "joined_text=false or joined_text=true"
            )
        if not fitting:
            expected = ", or ".join(f"{r.shape[0]}×{r.shape[1]} ({r})" for r in readings)
            raise UserError(
                f"masks have {rows}×{'?' if columns is None else columns} blocks; {grid.tokens} tokens "
                f"({grid.text_tokens} of text) in blocks of {grid.block_q}×{grid.block_k} make {expected}; correct "
                "thw (or tokens), text_tokens, block_q, block_k"
            )
        return fitting[0]

    def __str__(self) -> str:
        blocks = "blocks that run on from text into video" if self.joined else "blocks of text and of video"
        if self.text:
            return blocks if self.grid.text_tokens else "blocks"
        return f"{blocks}, text skipped"

    @property
    def left_out(self) -> tuple[int, int]:
        """Rows and columns of text missing in the masks."""
        text = 0 if self.text else self.grid.text_tokens
        return -(-text // self.grid.block_q), -(-text // self.grid.block_k)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        grid = self.grid
        if self.joined:
            rows, columns = -(-grid.tokens // grid.block_q), -(-grid.tokens // grid.block_k)
        else:
            rows, columns = block_counts(grid)
        return rows - self.left_out[0], columns - self.left_out[1]

    def fit(self, bits: torch.Tensor, tail_dense: bool = False) -> torch.Tensor:
        """Fits bool[H, rows, columns] to the grid → bool[H, nq, nk].

        Missing rows and columns of text become dense, with `tail_dense` also the last ones if the last block is short.
        With joined blocks, a block of the grid is active if any block that shares tokens with it is.
        """
        grid, (row, column) = self.grid, self.left_out
        whole = torch.nn.functional.pad(bits, (column, 0, row, 0), value=True)
        counted = grid.tokens - (0 if self.joined else grid.text_tokens)
        if tail_dense and counted % grid.block_q:
            whole[:, -1] = True
        if tail_dense and counted % grid.block_k:
            whole[:, :, -1] = True
        return _spread(_spread(whole, grid.q_axis, 1), grid.k_axis, 2) if self.joined else whole


def _spread(bits: torch.Tensor, axis: BlockAxis, dim: int) -> torch.Tensor:
    """Makes each block of the axis from the joined blocks that share tokens with it."""
    first, last = axis.starts // axis.block, (axis.starts + axis.lengths - 1) // axis.block
    result = bits.index_select(dim, torch.from_numpy(first))
    for step in range(1, int((last - first).max()) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(first + step, last)))
    return result
