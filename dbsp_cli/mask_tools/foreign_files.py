"""Arrays in other projects' files, which are never unpickled, and their blocks fitted to a grid of db-SP's."""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
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
from dbsp_core.utils.files import in_bytes, require_file, user_path

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")
_MOST_VALUES = 1 << 28
"""Most values of a tensor of which its file does not have each one, as of an expanded or a sparse one: a small file
could claim to have any number."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_NUMBERS = "biuf"
"""Kinds of NumPy's numbers that are read."""


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, read when it is used.

    Attributes:
        parts: Read the array in equal parts along its leading dimensions, mapped from disk if the format allows it.
    """

    shape: tuple[int, ...]
    parts: tuple[Callable[[], torch.Tensor], ...]

    def read(self) -> torch.Tensor:
        """Returns all of it."""
        parts = [part() for part in self.parts]
        return (parts[0] if len(parts) == 1 else torch.stack(parts)).reshape(self.shape)

    def masks(self) -> Iterator[torch.Tensor]:
        """Yields the masks [H, nq, nk] of an array […, H, nq, nk], with one part in memory at a time."""
        for part in self.parts:
            masks = part()
            yield from (masks[index] for index in np.ndindex(masks.shape[:-3]))

    def without_first(self) -> StoredArray:
        """Returns the same array without its first dimension, which is of 1."""
        return StoredArray(self.shape[1:], self.parts)


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
    try:
        arrays = _zipped_arrays(path) if path.suffix == ".npz" else _unpacked_arrays(path)
    except Exception as error:  # damaged files bring up every kind from the libraries that read them
        if isinstance(error, UserError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read without unpickling objects, or is damaged ({reason}); save plain "
            "tensors, in mappings at most: torch.save({'sparse': masks}, path)"
        ) from error
    if not arrays:
        raise UserError(f"{path} has no tensors in it")
    return arrays


def _zipped_arrays(path: Path) -> dict[str, StoredArray]:
    """Finds the arrays of numbers in an .npz file by their headers. Raises ValueError if it has none."""

    def read(member: str) -> torch.Tensor:
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            return _tensor(np.lib.format.read_array(file, allow_pickle=False))

    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.filename.endswith(".npy"):
                continue
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                header = "read_array_header_1_0" if version == (1, 0) else "read_array_header_2_0"
                shape, _, dtype = getattr(np.lib.format, header)(file)
                size = member.file_size - file.tell()
            if dtype.kind not in _NUMBERS:
                continue
            if size != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"{member.filename} has {size} bytes, not those of shape {list(shape)}")
            arrays[member.filename.removesuffix(".npy")] = StoredArray(shape, (partial(read, member.filename),))
    if not arrays:
        raise ValueError("it has no arrays of numbers")
    return arrays


def _unpacked_arrays(path: Path) -> dict[str, StoredArray]:
    # 1. The file's content, without running anything of it
    if path.suffix == ".safetensors":
        content: Any = load_file(path)
    elif path.suffix == ".npy":
        content = np.load(path, allow_pickle=False, mmap_mode="c")
    else:
        mapped = zipfile.is_zipfile(path)  # older files are no archives, and cannot be mapped
        if mapped:
            with zipfile.ZipFile(path) as archive:
                unpacked = sum(info.file_size for info in archive.infolist())
            if unpacked > path.stat().st_size:  # torch.save compresses nothing
                raise ValueError(f"it would unpack to {in_bytes(unpacked)}")
        with torch.sparse.check_sparse_tensor_invariants():  # else a sparse tensor's indices could lie anywhere
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    # 2. Its tensors, none of which has many more values than the file
    tensors = dict(_named_tensors(content))
    for name, tensor in tensors.items():
        plain = tensor.layout == torch.strided
        is_whole = plain and tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
        is_small = tensor.numel() <= _MOST_VALUES and (plain or tensor.layout in _SPARSE)
        if tensor.is_quantized or tensor.device.type != "cpu" or not (is_small or is_whole):
            raise UserError(
                f"{path}: tensor {name!r} of shape {list(tensor.shape)} is not whole in the file, but quantized, "
                "expanded or sparse; save it as .contiguous() or .to_dense() makes it"
            )
    return {name: StoredArray(tuple(tensor.shape), (partial(_dense, tensor),)) for name, tensor in tensors.items()}


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_dense() if tensor.layout in _SPARSE else tensor


def _named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors of nested mappings and lists, and arrays of numbers, with their names."""
    if isinstance(content, np.ndarray):
        if content.dtype.kind in _NUMBERS:
            yield name, _tensor(content)
    elif isinstance(content, torch.Tensor):
        yield name, content
    elif isinstance(content, (Mapping, list, tuple)):
        for key, value in content.items() if isinstance(content, Mapping) else enumerate(content):
            yield from _named_tensors(value, f"{name}/{key}" if name else str(key))


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Returns numbers of any byte order and precision as a tensor."""
    dtype = array.dtype.newbyteorder("=")
    if dtype.kind == "f" and dtype.itemsize > 8:  # which torch lacks
        dtype = np.dtype(np.float64)
    copy = not array.flags.writeable
    return torch.from_numpy(np.array(array, dtype) if copy else array.astype(dtype, copy=False))


def find_array(
    arrays: Mapping[str, StoredArray], wanted: str | None, usual: tuple[str, ...], where: object, option: str
) -> StoredArray | None:
    """Returns the array called `wanted`; else the first of the usual names that is there; None if none is.

    Raises:
        UserError: There is no `wanted`; the message names `option`.
    """
    if wanted is not None:
        if wanted not in arrays:
            raise UserError(f"{where} has no tensor {wanted!r}; {option} can be one of {', '.join(arrays) or 'none'}")
        return arrays[wanted]
    return next((arrays[name] for name in usual if name in arrays), None)


def numbered_arrays(arrays: Mapping[str, StoredArray]) -> StoredArray | None:
    """Joins arrays whose names differ in one number, 0 to L − 1, by layer; in two numbers, by step group and layer.

    Each is of one shape, [H, nq, nk], maybe after a batch dimension of 1. Returns None where that is not so.
    """
    each = [
        array.without_first() if len(array.shape) == 4 and array.shape[0] == 1 else array for array in arrays.values()
    ]
    words = [re.split(r"(\d+)", name) for name in arrays]  # every second part is a number
    if len({array.shape for array in each}) != 1 or len(each[0].shape) != 3 or len(set(map(len, words))) != 1:
        return None
    differing = [place for place, column in enumerate(zip(*words, strict=True)) if len(set(column)) > 1]
    if not 1 <= len(differing) <= 2 or any(place % 2 == 0 for place in differing):
        return None
    numbers = [tuple(int(parts[place]) for place in differing) for parts in words]
    leading = tuple(max(column) + 1 for column in zip(*numbers, strict=True))
    if sorted(numbers) != list(np.ndindex(leading)):
        return None
    in_order = [array for _, array in sorted(zip(numbers, each, strict=True), key=lambda pair: pair[0])]
    return StoredArray((*leading, *each[0].shape), tuple(array.read for array in in_order))


@dataclass(frozen=True)
class BlockReading:
    """A way to count blocks.

    Attributes:
        joined: True if blocks are counted from the first token on, so that one may hold text and video; else text and
            video have blocks of their own.
        text: True if blocks of text are among them; False: only the video's.
    """

    grid: BlockGrid
    joined: bool
    text: bool = True

    @classmethod
    def find(
        cls, rows: int, columns: int | None, grid: BlockGrid, joined: bool | None = None, crop: bool = False
    ) -> BlockReading:
        """Finds the reading of masks with these numbers of rows and columns of blocks.

        Args:
            columns: None where unknown.
            joined: None for whichever fits.
            crop: True if there may be more rows and columns at the end, which don't count.

        Raises:
            UserError: None fits or two do; the message names an option.
        """
        aligned = grid.text_tokens % grid.block_q == 0 and grid.text_tokens % grid.block_k == 0
        joinings = (False,) if aligned else (False, True) if joined is None else (joined,)
        kinds = (True, False) if grid.text_tokens else (True,)
        readings = [cls(grid, choice, text) for choice, text in itertools.product(joinings, kinds)]
        fitting = [r for r in readings if rows == r.shape[0] and columns in (None, r.shape[1])]
        beyond = [r for r in readings if r.shape[0] <= rows and r.shape[1] <= (columns or r.shape[1])]
        if not fitting and crop:
            fitting = [r for r in beyond if r.text]
        if len(fitting) > 1:
            raise UserError(
                f"{rows} rows of blocks could be {' or '.join(map(str, fitting))}; say which: "
                "joined_text=false or joined_text=true"
            )
        if not fitting:
            wanted = ", or ".join(f"{r.shape[0]}×{r.shape[1]} ({r})" for r in readings)
            raise UserError(
                f"masks have {rows}×{'?' if columns is None else columns} blocks; {grid.tokens} tokens "
                f"({grid.text_tokens} of text) in blocks of {grid.block_q}×{grid.block_k} make {wanted}; correct "
                "thw (or tokens), text_tokens, block_q, block_k"
                + ("; or drop what is beyond the last block with crop=true" if len(beyond) == len(readings) else "")
            )
        return fitting[0]

    def __str__(self) -> str:
        blocks = "blocks that run on from text into video" if self.joined else "blocks of text and of video"
        if self.text:
            return blocks if self.grid.text_tokens else "blocks"
        return f"{blocks}, those of text left out"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of masks that are read so."""
        sizes = self.grid.block_q, self.grid.block_k
        whole = [-(-self.grid.tokens // size) for size in sizes] if self.joined else block_counts(self.grid)
        rows, columns = (count - self.left_out(size) for count, size in zip(whole, sizes, strict=True))
        return rows, columns

    def left_out(self, block: int) -> int:
        """Returns the number of text rows or columns, in blocks of this size, that the masks lack."""
        return 0 if self.text else -(-self.grid.text_tokens // block)


def fit_blocks(bits: torch.Tensor, reading: BlockReading, tail_dense: bool = False) -> torch.Tensor:
    """Fits bool[H, ≥ rows, ≥ columns] to the reading's grid, as bool[H, nq, nk]; drops what is beyond the last block.

    Rows and columns of text that are left out become dense. Where blocks run on from text into video, a block of the
    grid is dense when any of those that share tokens with it is.

    Args:
        tail_dense: True to make the last row and column dense if the last block is short.
    """
    grid, (rows, columns) = reading.grid, reading.shape
    row, column = (reading.left_out(axis.block) for axis in (grid.q_axis, grid.k_axis))
    whole = torch.ones(bits.shape[0], rows + row, columns + column, dtype=torch.bool, device="cpu")
    whole[:, row:, column:] = bits[:, :rows, :columns]
    counted = grid.tokens - (0 if reading.joined else grid.text_tokens)
    if tail_dense and counted % grid.block_q:
        whole[:, -1] = True
    if tail_dense and counted % grid.block_k:
        whole[:, :, -1] = True
    return _spread(_spread(whole, grid.q_axis, 1), grid.k_axis, 2) if reading.joined else whole


def _spread(bits: torch.Tensor, axis: BlockAxis, dim: int) -> torch.Tensor:
    """Makes each block of the axis from those that share tokens with it, counted from the first token on."""
    first, last = axis.starts // axis.block, (axis.starts + axis.lengths - 1) // axis.block
    result = bits.index_select(dim, torch.from_numpy(first))
    for step in range(1, int((last - first).max()) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(first + step, last)))
    return result
