"""Block masks on a grid, and their file format."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dbsp_core.counting import MaskCounts
from dbsp_core.files import write_atomically
from dbsp_core.grid import BlockGrid

__all__ = ["BlockMask", "MaskFile", "save_mask"]


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which (query block, key block) pairs each head computes.

    bits: bool[H, nq, nk], a tensor on any device or a numpy array; True is a dense block. Rows may be empty.
    Raises ValueError when the shape does not fit the grid.
    """

    bits: torch.Tensor
    grid: BlockGrid

    def __post_init__(self) -> None:
        bits = torch.as_tensor(self.bits)
        if bits.dtype != torch.bool:
            raise ValueError(f"mask bits must be bool, got {bits.dtype}; compare with a threshold first")
        expected = (self.grid.nq, self.grid.nk)
        if bits.ndim != 3 or tuple(bits.shape[1:]) != expected or bits.shape[0] < 1:
            raise ValueError(
                f"mask of shape {tuple(bits.shape)} does not fit {self.grid.tokens} tokens in blocks of "
                f"{self.grid.block_q}×{self.grid.block_k}: expected [heads, {expected[0]}, {expected[1]}]"
            )
        if len(self.grid.orders) not in (1, bits.shape[0]):
            raise ValueError(
                f"the grid has token orders for {len(self.grid.orders)} heads, the mask {bits.shape[0]} heads"
            )
        object.__setattr__(self, "bits", bits)

    @classmethod
    def dense(cls, heads: int, grid: BlockGrid) -> BlockMask:
        """Every block of every head."""
        return cls(torch.ones(heads, grid.nq, grid.nk, dtype=torch.bool), grid)

    @property
    def heads(self) -> int:
        return int(self.bits.shape[0])

    @property
    def density(self) -> float:
        """Share of blocks that are dense."""
        return int(self.bits.sum()) / self.bits.numel()

    @cached_property
    def fingerprint(self) -> int:
        """63 bits that differ between masks, to compare ranks by."""
        digest = hashlib.blake2b(str(self.grid).encode(), digest_size=8)
        for head in self.bits:
            digest.update(np.packbits(head.cpu().numpy()).tobytes())
        return int.from_bytes(digest.digest(), "big") >> 1

    def refined(self, grid: BlockGrid) -> BlockMask:
        """The same mask on a grid whose blocks are parts of this one's. Raises ValueError when they are not."""
        old, new = self.grid, grid
        if old == new:
            return self
        if not new.refines(old):
            raise ValueError(f"the blocks of {new} are not parts of those of {old}")
        rows = torch.from_numpy(old.q_axis.block_of[new.q_axis.starts]).to(self.bits.device)
        columns = torch.from_numpy(old.k_axis.block_of[new.k_axis.starts]).to(self.bits.device)
        return BlockMask(self.bits[:, rows][:, :, columns], grid)

    @cached_property
    def counts(self) -> MaskCounts:
        """Dense blocks by row, column and slot."""
        return MaskCounts(self.bits)


class MaskFile:
    """A mask file: safetensors with one tensor `mask`, uint8 0/1, of shape [H, nq, nk] or [L, H, nq, nk].

    Metadata strings: block_q, block_k, tokens, text_tokens. A 3-D mask serves every layer. Layers are read one at a
    time. Raises ValueError, naming the file and the fix, for a file that is not one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ValueError(f"mask file {self.path} does not exist; give the path of a .safetensors mask")
        try:
            with safe_open(self.path, framework="pt") as file:
                names = list(file.keys())
                metadata = file.metadata() or {}
                tensor = file.get_slice("mask") if "mask" in names else None
                dtype, shape = (tensor.get_dtype(), tuple(tensor.get_shape())) if tensor else (None, ())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"mask file {self.path} is not a readable safetensors file ({error}); write it again with "
                "dbsp_core.save_mask"
            ) from error
        if tensor is None:
            raise ValueError(f"mask file {self.path} has no tensor 'mask' (it has {names}); name the tensor 'mask'")
        if dtype != "U8" or len(shape) not in (3, 4) or 0 in shape:
            raise ValueError(
                f"mask file {self.path}: tensor 'mask' is {dtype} of shape {list(shape)}, expected uint8 (U8) of "
                "shape [heads, nq, nk] or [layers, heads, nq, nk], none of them 0"
            )
        self.grid = self._grid(metadata)
        if shape[-2:] != (self.grid.nq, self.grid.nk):
            raise ValueError(
                f"mask file {self.path}: shape {list(shape)} does not fit its metadata, which makes "
                f"{self.grid.nq}×{self.grid.nk} blocks; correct block_q, block_k, tokens or text_tokens"
            )
        self._shape = shape

    def _grid(self, metadata: dict[str, str]) -> BlockGrid:
        keys = ("tokens", "text_tokens", "block_q", "block_k")
        missing = [key for key in keys if key not in metadata]
        if missing:
            raise ValueError(
                f"mask file {self.path} lacks metadata {', '.join(missing)}; save it with block_q, block_k, tokens "
                "and text_tokens as strings"
            )
        try:
            tokens, text_tokens, block_q, block_k = (int(metadata[key]) for key in keys)
            return BlockGrid(tokens, text_tokens, block_q, block_k)
        except ValueError as error:
            raise ValueError(f"mask file {self.path}: bad metadata: {error}") from error

    @property
    def layers(self) -> int:
        """Number of layers; 1 when one mask serves all."""
        return self._shape[0] if len(self._shape) == 4 else 1

    @property
    def per_layer(self) -> bool:
        return len(self._shape) == 4

    @property
    def heads(self) -> int:
        return self._shape[-3]

    def layer(self, index: int) -> BlockMask:
        """The mask of one layer. Raises ValueError for a layer the file lacks or for values other than 0 and 1."""
        if self.per_layer and not 0 <= index < self.layers:
            raise ValueError(f"mask file {self.path} has {self.layers} layers, there is no layer {index}")
        with safe_open(self.path, framework="pt") as file:
            view = file.get_slice("mask")
            values = view[index] if self.per_layer else view[:]
        if int(values.max()) > 1:
            raise ValueError(f"mask file {self.path}: values must be 0 or 1, found {int(values.max())}")
        return BlockMask(values.bool(), self.grid)


def save_mask(path: str | os.PathLike[str], masks: BlockMask | list[BlockMask]) -> None:
    """Writes one mask for all layers, or a list with one mask per layer. The file appears whole or not at all."""
    per_layer = isinstance(masks, list)
    layers: list[BlockMask] = masks if isinstance(masks, list) else [masks]
    if not layers:
        raise ValueError("save_mask needs at least one mask")
    grid = layers[0].grid
    if any(mask.grid != grid or mask.heads != layers[0].heads for mask in layers):
        raise ValueError("all layers of a mask file need the same grid and number of heads")
    stacked = torch.stack([mask.bits.cpu() for mask in layers]).to(torch.uint8)
    metadata = {key: str(getattr(grid, key)) for key in ("block_q", "block_k", "tokens", "text_tokens")}
    write_atomically(path, save({"mask": stacked if per_layer else stacked[0]}, metadata=metadata))
