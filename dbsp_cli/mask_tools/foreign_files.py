"""Arrays in other projects' files, which are never unpickled, and their blocks fitted to a grid of db-SP's."""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from dbsp_core.masks.grid import BlockAxis, BlockGrid
from dbsp_core.masks.mask_file import block_counts
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file, user_path

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, read when it is used, in equal parts along its leading dimensions."""

    shape: tuple[int, ...]
    parts: tuple[Callable[[], torch.Tensor], ...]

    def read(self) -> torch.Tensor:
        return torch.stack([part() for part in self.parts]).reshape(self.shape)

    def masks(self) -> Iterator[torch.Tensor]:
        """Yields the masks [H, nq, nk] of an array […, H, nq, nk], with one part in memory at a time."""
        for part in self.parts:
            masks = part()
            yield from (masks[index] for index in np.ndindex(masks.shape[:-3]))


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Finds every array in a file by its name: "" for a lone one, "a/b" in nested mappings, "a/0" in lists.

    Nothing is unpickled. Arrays of .npz are unpacked when they are used, others mapped from disk where possible.

    Raises:
        UserError: It is no such file, or has nothing to read in it.
    """
    path = user_path(path)
    require_file(path, "file", "give the path of a file with masks")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} has an unknown suffix; masks are read from {', '.join(SUFFIXES)}")
    with _readable(path):
        if path.suffix == ".npz":
            arrays = _zipped_arrays(path)
        else:
            tensors = dict(_named_tensors(_content(path)))
            arrays = {name: StoredArray(tuple(t.shape), (partial(_plain, path, t),)) for name, t in tensors.items()}
    if not arrays:
        raise UserError(f"{path} has no tensors in it")
    return arrays


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # damaged files bring up every kind from the libraries that read them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read without unpickling objects, or is damaged ({reason}); save plain tensors, in "
            "mappings at most: torch.save({'sparse': masks}, path)"
        ) from error


def _zipped_arrays(path: Path) -> dict[str, StoredArray]:
    """Finds the arrays of numbers in an .npz file by their headers. Raises ValueError if it has none."""

    def read(name: str) -> torch.Tensor:
        with _readable(path), np.load(path, allow_pickle=False) as archive:
            return torch.from_numpy(archive[name])

    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
                shape, _, dtype = getattr(np.lib.format, header)(file)
                size = member.file_size - file.tell()
            name = member.filename.removesuffix(".npy")
            if dtype.kind == "O":
                raise ValueError(f"{name} is an array of objects")
            if size != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{name} has {size} bytes, not those of shape {list(shape)}")
            arrays[name] = StoredArray(shape, (partial(read, name),))
    return arrays


def _content(path: Path) -> Any:
    """Reads a file without running anything of it."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False, mmap_mode="c"))
    mapped = zipfile.is_zipfile(path)  # older files are no archives, and cannot be mapped
    if mapped:
        with zipfile.ZipFile(path) as archive:
            mapped = all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested mappings and lists with their names."""
    if isinstance(content, torch.Tensor):
        yield name, content
    elif isinstance(content, (Mapping, list, tuple)):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _named_tensors(value, f"{name}/{key}" if name else str(key))


def _plain(path: Path, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        shape = list(tensor.shape)
        raise UserError(f"{path}: a tensor of shape {shape} is sparse or quantized; save it as .to_dense() makes it")
    return tensor


def by_layer(arrays: Mapping[str, StoredArray]) -> StoredArray | None:
    """Joins arrays [H, nq, nk], or [1, H, nq, nk], whose names differ in one number, the layer's, from 0 to L − 1.

    Returns None where that is not so.
    """
    words, shapes = [re.split(r"(\d+)", name) for name in arrays], {array.shape for array in arrays.values()}
    if len({len(parts) for parts in words}) != 1 or len(shapes) != 1:
        return None
    differing = [column for column in zip(*words, strict=True) if len({*column}) > 1]
    shape = shapes.pop()
    if len(differing) != 1 or math.prod(shape[:-3]) != 1:
        return None
    layers = {int(number): a for number, a in zip(differing[0], arrays.values(), strict=True) if number.isdecimal()}
    if layers.keys() != set(range(len(arrays))):
        return None
    parts = [part for layer in range(len(arrays)) for part in layers[layer].parts]
    return StoredArray((len(arrays), *shape[-3:]), tuple(parts))


@dataclass(frozen=True)
class ForeignBlocks:
    """How masks count blocks.

    Attributes:
        joined: True if blocks are counted from the first token on, so that one may hold text and video; False: text
            and video have blocks of their own.
        text: True if blocks of text are among them; False: only the video's.
    """

    grid: BlockGrid
    joined: bool
    text: bool = True

    @classmethod
    def find(cls, rows: int, columns: int | None, grid: BlockGrid, joined: bool | None = None) -> ForeignBlocks:
        """Finds how masks with these rows and columns count blocks.

        Args:
            columns: None where unknown.
            joined: None for whichever fits.

        Raises:
            UserError: None fits or two do; the message names an option.
        """
        aligned = grid.text_tokens % grid.block_q == 0 and grid.text_tokens % grid.block_k == 0
        joinings = (False,) if aligned else (False, True) if joined is None else (joined,)
        kinds = (True, False) if grid.text_tokens else (True,)
        readings = [cls(grid, choice, text) for choice, text in itertools.product(joinings, kinds)]
        fitting = [r for r in readings if rows == r.shape[0] and columns in (None, r.shape[1])]
        if len(fitting) > 1:
            raise UserError(
                f"{rows} rows of blocks could be {' or '.join(map(str, fitting))}; say which: "
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
        return f"{blocks}, those of text left out"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        sizes = self.grid.block_q, self.grid.block_k
        whole = [-(-self.grid.tokens // size) for size in sizes] if self.joined else block_counts(self.grid)
        rows, columns = (count - self.left_out(size) for count, size in zip(whole, sizes, strict=True))
        return rows, columns

    def left_out(self, block: int) -> int:
        """Returns the number of text rows or columns, in blocks of this size, that the masks lack."""
        return 0 if self.text else -(-self.grid.text_tokens // block)

    def fit(self, bits: torch.Tensor, tail_dense: bool = False) -> torch.Tensor:
        """Fits bool[H, rows, columns] to the grid, as bool[H, nq, nk].

        Rows and columns of text that are left out become dense. Where blocks run on from text into video, a block of
        the grid is dense when any of those that share tokens with it is.

        Args:
            tail_dense: True to make the last row and column dense if the last block is short.
        """
        grid = self.grid
        row, column = self.left_out(grid.block_q), self.left_out(grid.block_k)
        whole = torch.nn.functional.pad(bits, (column, 0, row, 0), value=True)
        counted = grid.tokens - (0 if self.joined else grid.text_tokens)
        if tail_dense and counted % grid.block_q:
            whole[:, -1] = True
        if tail_dense and counted % grid.block_k:
            whole[:, :, -1] = True
        return _spread(_spread(whole, grid.q_axis, 1), grid.k_axis, 2) if self.joined else whole


def _spread(bits: torch.Tensor, axis: BlockAxis, dim: int) -> torch.Tensor:
    """Makes each block of the axis from those that share tokens with it, counted from the first token on."""
    first, last = axis.starts // axis.block, (axis.starts + axis.lengths - 1) // axis.block
    result = bits.index_select(dim, torch.from_numpy(first))
    for step in range(1, int((last - first).max()) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(first + step, last)))
    return result
