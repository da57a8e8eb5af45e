"""Masks of cases, from every kind of source."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.sources import (
    CallableSource,
    DenseSource,
    FileSource,
    LocalQK,
    LowRankSource,
    MaskRequest,
    MaskSource,
    RadialSource,
    SolSource,
    SpargeSource,
    SvgSource,
    SyntheticSource,
    UnionSource,
    VsaSource,
    WindowSource,
    packed_mask,
)
from dbsp_core.sources.base import BlockSizes
from scripts.checks.stress.oracle.attention_case import Draw
from tests.support.generators import random_bits


@dataclass(frozen=True)
class RandomSource(BlockSizes):
    """Asymmetric, unequal over heads, rows and columns; some rows and columns are empty."""

    seed: int = 0
    density: float = 0.4
    orders: tuple[str, ...] = ("thw",)

    def mask(self, request: MaskRequest) -> BlockMask:
        rng = np.random.default_rng(self.seed)
        grid = replace(self.grid(request), orders=self.orders)
        bits = random_bits(request.heads, grid, self.seed, self.density)
        bits[rng.random((request.heads, grid.nq)) < 0.1] = False
        if rng.random() < 0.5:
            bits[:, :, rng.integers(grid.nk)] = False
        return BlockMask(bits, grid)


def sources_of(case: Draw) -> list[tuple[BlockGrid, MaskSource]]:
    """Returns the grid and the source of each sequence."""
    found = []
    for number, one in enumerate(case.sequences):
        grid = BlockGrid(one.tokens, one.text, case.block_q, case.block_k, one.thw)
        found.append((grid, _source(one.source, case, case.seed + number)))
    return found


def _source(kind: str, case: Draw, seed: int) -> MaskSource:
    blocks, rng = (case.block_q, case.block_k), np.random.default_rng(seed)
    if kind in ("random", "file"):
        made = RandomSource(*blocks, seed, case.density, case.orders)
        return made if kind == "random" else _Stored(*blocks, made, bool(rng.integers(2)))
    if kind == "window":
        return WindowSource(*blocks, window=tuple(rng.integers(1, 7, 3).tolist()))
    if kind == "tile":
        window, tile = (tuple(rng.integers(1, 4, 3).tolist()) for _ in range(2))
        return WindowSource(*blocks, window=window, tile=tile)
    if kind == "radial":
        return RadialSource(*blocks, width=float(rng.uniform(0.1, 1.5)), sink_frames=int(rng.integers(3)))
    if kind == "svg":
        return SvgSource(*blocks, frames=int(rng.integers(1, 5)), temporal_heads=float(rng.random()))
    if kind == "function":
        return CallableSource(*blocks, function=_function, parameters={"seed": seed, "density": case.density})
    if kind == "sol":
        return SolSource(*blocks, tau=float(rng.uniform(-1, 2)), thresh_type=str(rng.choice(["diag", "exact"])))  # type: ignore[arg-type]
    if kind == "union":
        window = WindowSource(*blocks, window=tuple(rng.integers(1, 5, 3).tolist()))
        return UnionSource((window, SpargeSource(*blocks, topk=float(rng.uniform(0.1, 0.6)), similarity=0.2)))
    if kind == "vsa":
        tile = _tile_of(case.block_q, rng)
        return VsaSource(*blocks, sparsity=float(rng.uniform(0, 0.95)), tile=tile, coarse=False)
    if kind == "synthetic":
        return SyntheticSource(*blocks, density=float(rng.uniform(0.05, 1.0)), seed=seed)
    if kind in ("sparge", "lowrank"):
        settings: dict[str, Any] = {"block_q": case.block_q, "block_k": case.block_k}
        settings[str(rng.choice(["cdf", "topk"]))] = float(rng.uniform(0.1, 1.0))
        settings |= {name: bool(rng.integers(2)) for name in ("attention_sink", "dense_text")}
        settings["token_order"] = str(rng.choice(["thw", "hwt", "tile:2x2x2"]))
        if kind == "sparge":
            return SpargeSource(**settings, similarity=0.2)
        return _fitted(settings | {"queries": str(rng.choice(["mean", "all"]))}, case.heads, case.head_dim, rng)
    return DenseSource(*blocks)


def _function(grid: BlockGrid, request: MaskRequest, seed: int, density: float) -> np.ndarray:
    """Returns a user's masks, from what a function is given."""
    rng = np.random.default_rng([seed, request.layer])
    return rng.random((request.heads, grid.nq, grid.nk)) < density * rng.uniform(0.2, 1.8, (request.heads, 1, 1))


def _tile_of(block: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Returns frames, rows and columns of a tile of so many tokens."""
    frames = int(rng.choice([one for one in range(1, block + 1) if block % one == 0]))
    rows = int(rng.choice([one for one in range(1, block // frames + 1) if block // frames % one == 0]))
    return frames, rows, block // frames // rows


@dataclass(frozen=True, eq=False)
class _Stored(BlockSizes):
    """Another source's masks, by way of a file."""

    made: RandomSource = RandomSource()
    packed: bool = False

    def mask(self, request: MaskRequest) -> BlockMask:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mask.safetensors"
            save_mask(path, self.made.mask(request), packed=self.packed)
            return FileSource(str(path)).mask(request)


def _fitted(source: dict[str, Any], heads: int, head_dim: int, rng: np.random.Generator) -> LowRankSource:
    """Makes random projections, as good as any here. The file is read before it is gone."""
    rank = int(rng.integers(1, head_dim + 1))
    tensors = {
        f"{side}.0": torch.from_numpy(rng.normal(size=(heads, head_dim, rank)).astype(np.float32))
        for side in ("query", "key")
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted.safetensors"
        save_file(tensors, path)
        found = LowRankSource(**source, path=str(path))
        found.grid(MaskRequest(0, heads, (1, 1, 1)))
    return found


def mask_of(case: Draw, sources: Sequence[tuple[BlockGrid, MaskSource]], tokens: LocalQK) -> BlockMask:
    """Returns a mask of B·H heads if a source predicts for a batch, else of H. Collective if a source predicts."""
    grid, source = sources[0]
    request = MaskRequest(0, case.heads, grid.thw, grid.text_tokens)
    if len(sources) > 1:
        return packed_mask(sources, request, tokens if case.predicted else None)
    return source.mask(request, tokens) if source.changes == "per_call" else source.mask(request)
