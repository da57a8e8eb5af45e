"""Masks in other projects' files: tensors, PAROAttention's plans, and text whose blocks are of other sizes."""

from __future__ import annotations

import itertools
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.torch import load_file

from dbsp_core.masks.grid import CANONICAL, BlockAxis, BlockGrid, require_order
from dbsp_core.masks.mask_file import Orders, block_counts, one_or_each
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import in_bytes, require_file, user_path

SUFFIXES = (".safetensors", ".pt", ".pth", ".npy", ".npz")
_MOST_VALUES = 1 << 28
"""Most values of a tensor of which its file does not have each one, as of an expanded or a sparse one: a small file
could claim to have any number."""
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


@dataclass(frozen=True)
class StoredArray:
    """An array in a file, read when it is used.

    Attributes:
        read: Reads all of it.
        masks: Reads the masks [H, nq, nk] of an array […, H, nq, nk], one in memory at a time.
    """

    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    masks: Callable[[], Iterator[torch.Tensor]]

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> StoredArray:
        """Wraps a tensor, which is mapped from disk if its format allows it."""

        def read() -> torch.Tensor:
            return tensor.to_dense() if tensor.layout in _SPARSE else tensor

        def masks() -> Iterator[torch.Tensor]:
            dense = read()
            yield from (dense[index] for index in np.ndindex(dense.shape[:-3]))

        return cls(tuple(tensor.shape), read, masks)

    @classmethod
    def of_zip(cls, path: Path, member: str) -> StoredArray | None:
        """Wraps a compressed array of an .npz file, of which it reads the header; None unless it has numbers."""
        with zipfile.ZipFile(path) as archive, archive.open(member) as file:
            shape, fortran, dtype = _npy_header(file)
            start, size = file.tell(), archive.getinfo(member).file_size
        if dtype.kind not in _NUMBERS:
            return None
        if size - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{member} has {size - start} bytes, not those of shape {list(shape)}")

        def read() -> torch.Tensor:
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                return _tensor(np.lib.format.read_array(file, allow_pickle=False))

        def masks() -> Iterator[torch.Tensor]:
            if fortran:
                yield from cls.of_tensor(read()).masks()
                return
            with zipfile.ZipFile(path) as archive, archive.open(member) as file:
                _npy_header(file)
                for _ in np.ndindex(shape[:-3]):
                    content = file.read(math.prod(shape[-3:]) * dtype.itemsize)
                    yield _tensor(np.frombuffer(content, dtype).reshape(shape[-3:]))

        return cls(shape, read, masks)

    @classmethod
    def stacked(cls, arrays: Sequence[StoredArray], leading: tuple[int, ...]) -> StoredArray:
        """Joins arrays of one shape along leading dimensions."""
        shape = (*leading, *arrays[0].shape)
        return cls(
            shape,
            lambda: torch.stack([one.read() for one in arrays]).reshape(shape),
            lambda: itertools.chain.from_iterable(one.masks() for one in arrays),
        )

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def without_first(self) -> StoredArray:
        """Returns the same array without its first dimension, which is of 1."""
        return StoredArray(self.shape[1:], lambda: self.read()[0], self.masks)


def read_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Finds every array in a file by its name: "" for a lone one, "a/b" in nested mappings, "a/0" in lists.

    .pt and .pth are read with weights_only, .npy and .npz without pickles; arrays of .npz are unpacked when they are
    used, others are mapped from disk where the format allows it.

    Raises:
        UserError: It is no such file, or has nothing to read in it.
    """
    path = user_path(path)
    require_file(path, "file", "give the path of a file with masks")
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path} has an unknown suffix; masks are read from {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".npz":
            return _zipped_arrays(path)
        tensors = dict(_named_tensors(_read(path)))
    except Exception as error:  # damaged files bring up every kind from the libraries that read them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{path} cannot be read without unpickling objects, or is damaged ({reason}); save plain "
            "tensors, in mappings at most: torch.save({'sparse': masks}, path)"
        ) from error
    for name, tensor in tensors.items():
        if not _is_whole(tensor):
            kind = "quantized" if tensor.is_quantized else "expanded or sparse"
            raise UserError(
                f"{path}: tensor {name!r} of shape {list(tensor.shape)} is not whole in the file, but {kind}; save it "
                "as .contiguous() or .to_dense() makes it"
            )
    if not tensors:
        raise UserError(f"{path} has no tensors in it")
    return {name: StoredArray.of_tensor(tensor) for name, tensor in tensors.items()}


def _is_whole(tensor: torch.Tensor) -> bool:
    """Returns True unless a tensor has too many values that are not in its file one by one."""
    if tensor.device.type != "cpu" or tensor.is_quantized:
        return False
    if tensor.numel() <= _MOST_VALUES:
        return tensor.layout == torch.strided or tensor.layout in _SPARSE
    if tensor.layout != torch.strided:
        return False
    return tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()


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
    each = [one.without_first() if one.ndim == 4 and one.shape[0] == 1 else one for one in arrays.values()]
    words = [re.split(r"(\d+)", name) for name in arrays]
    if len({one.shape for one in each}) != 1 or each[0].ndim != 3 or len({len(one) for one in words}) != 1:
        return None
    differing = [place for place, column in enumerate(zip(*words, strict=True)) if len(set(column)) > 1]
    if not 1 <= len(differing) <= 2 or any(place % 2 == 0 for place in differing):  # between the numbers is text
        return None
    numbers = [tuple(int(one[place]) for place in differing) for one in words]
    leading = tuple(max(column) + 1 for column in zip(*numbers, strict=True))
    if sorted(numbers) != list(np.ndindex(leading)):
        return None
    in_order = [array for _, array in sorted(zip(numbers, each, strict=True), key=lambda pair: pair[0])]
    return StoredArray.stacked(in_order, leading)


def _read(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".npy":
        return np.load(path, allow_pickle=False, mmap_mode="c")
    mapped = zipfile.is_zipfile(path)  # older files are no archives, and cannot be mapped
    if mapped:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > path.stat().st_size:  # torch.save compresses nothing
            raise ValueError(f"it would unpack to {in_bytes(unpacked)}")
    with torch.sparse.check_sparse_tensor_invariants():  # else a sparse tensor's indices could lie anywhere
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def _zipped_arrays(path: Path) -> dict[str, StoredArray]:
    """Finds the arrays of numbers in an .npz file. Raises ValueError if it has none."""
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.endswith(".npy")]
    arrays = {name.removesuffix(".npy"): StoredArray.of_zip(path, name) for name in names}
    found = {name: array for name, array in arrays.items() if array is not None}
    if not found:
        raise ValueError("it has no arrays of numbers")
    return found


def _npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Reads shape, order (True for Fortran's) and dtype from the beginning of an .npy file."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    return shape, fortran, dtype


_NUMBERS = "biuf"
"""Kinds of NumPy's numbers that are read."""


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


PARO_ORDERS = ("thw", "twh", "hwt", "htw", "wht", "wth")
"""PAROAttention's numbering of token orders, in its `permute_plan['permute']`."""


def is_file(text: str) -> bool:
    """Returns True for the path of a file with arrays, by its suffix."""
    return Path(text).suffix in SUFFIXES


def token_orders(given: str | None, plan: Mapping[str, StoredArray], shape: Sequence[int]) -> tuple[Orders, ...]:
    """Returns the token orders of each mask, or one for all masks.

    Args:
        given: Orders in words, separated by commas, or the path of the plan.
        plan: Tensors of a permute plan, with indices into PARO_ORDERS in 'permute'; else of the masks' own file.
        shape: Shape of the masks, […, H, nq, nk].

    Raises:
        UserError: There is no such order, or the orders don't fit the masks.
    """
    if given is not None and not is_file(given):
        names = [name.strip() for name in given.split(",")]
        for name in names:
            require_order(name)
        if len(names) not in (1, shape[-3]):
            raise UserError(f"orders names {len(names)} token orders, the masks have {shape[-3]} heads")
        return (one_or_each(names),)
    if given is None and "permute" not in plan:
        return ((CANONICAL,),)
    table = _by_mask(_table(plan, "permute", "token orders", given), shape, "token orders")
    if int(table.min()) < 0 or int(table.max()) >= len(PARO_ORDERS):
        raise UserError(f"token orders must be 0 to 5 ({', '.join(PARO_ORDERS)}), found {int(table.max())}")
    return tuple(one_or_each([PARO_ORDERS[number] for number in row]) for row in table.long().tolist())


def empty_heads(plan: Mapping[str, StoredArray], shape: Sequence[int]) -> torch.Tensor:
    """Returns bool[masks, H]: heads that a permute plan calls empty."""
    if "empty" not in plan:
        raise UserError("skip_empty needs a permute plan with a tensor 'empty'; name its file with orders=FILE")
    return _by_mask(plan["empty"].read(), shape, "empty heads").bool()


def head_permutations(given: str, shape: Sequence[int]) -> torch.Tensor:
    """Returns int64[masks, H]: the head that is at each position of the stored masks, from the file `given`.

    Raises:
        UserError: It is no permutation of the heads.
    """
    permutations = _table(read_arrays(given), "perm_idx", "a permutation of heads", given)
    table = _by_mask(permutations, shape, "permutations of heads").long()
    if not torch.equal(table.sort(dim=1).values, torch.arange(shape[-3], device="cpu").expand(table.shape)):
        raise UserError(f"{given}: each row must hold every head from 0 to {shape[-3] - 1} once")
    return table


def _table(plan: Mapping[str, StoredArray], name: str, what: str, where: str | None) -> torch.Tensor:
    """Returns the tensor of that name, or the only one."""
    if name in plan or len(plan) == 1:
        return plan.get(name, next(iter(plan.values()))).read()
    raise UserError(f"{where} has no tensor {name!r} with {what} (it has {', '.join(plan)})")


def _by_mask(table: torch.Tensor, shape: Sequence[int], what: str) -> torch.Tensor:
    """Expands [H], [L, H] or [S, L, H] to [masks, H]."""
    leading = tuple(shape[:-2])
    if table.ndim == 0 or tuple(table.shape) != leading[len(leading) - table.ndim :]:
        raise UserError(f"{what} of shape {list(table.shape)} do not fit masks of shape {list(shape)}")
    return table.expand(leading).reshape(-1, leading[-1])


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
        readings = [
            cls(grid, one, text) for one in joinings for text in ((True, False) if grid.text_tokens else (True,))
        ]
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

    def short(self, axis: BlockAxis) -> bool:
        """Returns True if the last block is shorter than the others."""
        return (self.grid.tokens - (0 if self.joined else self.grid.text_tokens)) % axis.block != 0


def fit_blocks(bits: torch.Tensor, reading: BlockReading, tail_dense: bool = False) -> torch.Tensor:
    """Fits bool[H, ≥ rows, ≥ columns] to the reading's grid, as bool[H, nq, nk]; drops what is beyond the last block.

    Rows and columns of text that are left out become dense. Where blocks run on from text into video, a block of the
    grid is dense when any of those that share tokens with it is.

    Args:
        tail_dense: True to make the last row and column dense if the last block is short.
    """
    q, k = reading.grid.q_axis, reading.grid.k_axis
    rows, columns = reading.shape
    given = bits[:, :rows, :columns]
    row, column = reading.left_out(q.block), reading.left_out(k.block)
    whole = torch.ones(given.shape[0], given.shape[1] + row, given.shape[2] + column, dtype=torch.bool, device="cpu")
    whole[:, row:, column:] = given
    if tail_dense and reading.short(q):
        whole[:, -1] = True
    if tail_dense and reading.short(k):
        whole[:, :, -1] = True
    return _spread(_spread(whole, q, 1), k, 2) if reading.joined else whole


def _spread(bits: torch.Tensor, axis: BlockAxis, dim: int) -> torch.Tensor:
    """Makes each block of the axis from those that share tokens with it, counted from the first token on."""
    first, last = axis.starts // axis.block, (axis.starts + axis.lengths - 1) // axis.block
    result = bits.index_select(dim, torch.from_numpy(first))
    for step in range(1, int((last - first).max()) + 1):
        result = result | bits.index_select(dim, torch.from_numpy(np.minimum(first + step, last)))
    return result
