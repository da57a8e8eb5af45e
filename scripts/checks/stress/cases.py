"""Cases of attention, each drawn from (seed, number) alone; and the masks of a case."""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dbsp_core import BlockGrid, BlockMask, Strategy, save_mask
from dbsp_core.layout.sequence_layout import LAYOUTS
from dbsp_core.planning.planners import PLANNERS
from dbsp_core.sources import (
    CallableSource,
    CubeSource,
    DenseSource,
    FileSource,
    LocalQK,
    LowRankSource,
    MaskRequest,
    MaskSource,
    RadialSource,
    SlaSource,
    SolSource,
    SpargeSource,
    SstaSource,
    SubBlockSource,
    SvgSource,
    SyntheticSource,
    UnionSource,
    VsaSource,
    WindowSource,
    packed_mask,
)
from dbsp_core.sources.base import BlockSizes
from tests.support.attention_cases import Case
from tests.support.generators import random_bits

WORLDS = tuple(range(1, 9))
CASES_PER_WORLD = 20  # so many numbers in a row have one world size: starting processes takes seconds
ORDERS = ("thw", "twh", "htw", "hwt", "wth", "wht", "tile:2x2x2", "tile:1x3x4")
STATIC = ("random", "dense", "window", "tile", "radial", "svg", "synthetic", "file", "function")
PREDICTED = ("sparge", "lowrank", "sol", "union", "vsa", "subblock", "cube", "ssta", "sla")
BLOCKS = (1, 3, 5, 8, 12, 16, 16, 24, 32)
TOKENS = 420  # most of a sequence's video


@dataclass(frozen=True)
class DrawnSequence:
    """One sequence of a case. thw: frames, rows, columns of video;  text: tokens before it;  source: of its mask"""

    thw: tuple[int, int, int]
    text: int
    source: str

    @property
    def tokens(self) -> int:
        return self.text + math.prod(self.thw)


@dataclass(frozen=True)
class Draw(Case):
    """One attention, or one attention and its backward, of several packed sequences or one.

    `tokens`, `text_tokens` and `thw` are the sequences' own. `orders` (one for all heads or one per head) are those of
    mask sources "random" and "file". `layout` may also be "shuffled", for tokens in no order.
    """

    sequences: tuple[DrawnSequence, ...] = ()
    backward: bool = False

    @property
    def world(self) -> int:
        return Strategy.parse(self.strategy).world

    @property
    def predicted(self) -> bool:
        return any(sequence.source in PREDICTED for sequence in self.sequences)

    @property
    def possible(self) -> bool:
        """True if db-SP supports it."""
        text_alone = self.streams is not None and not any(sequence.text for sequence in self.sequences)
        batch = self.batch == 1 or len(self.sequences) == 1 or not self.predicted
        of_tiles = any(sequence.source in ("vsa", "cube") for sequence in self.sequences)
        tiles = self.block_q == self.block_k or not of_tiles
        kernel = self.kernel != "triton" or self.dtype != torch.float64
        return not text_alone and batch and tiles and kernel and not (self.backward and self.precision == "int8")


def draw_case(seed: int, number: int) -> Draw:
    """Returns the same case for equal arguments, on every machine."""
    rng = random.Random(f"{seed}:{number}")
    world = random.Random(f"{seed}:world:{number // CASES_PER_WORLD}").choice(WORLDS)
    case = _draw(rng, world)
    while not case.possible:
        case = _draw(rng, world)
    return case


def _draw(rng: random.Random, world: int) -> Draw:
    kernel = rng.choices(["auto", "cpu", "reference", "triton"], [10, 4, 4, 0.1])[0]
    small = kernel == "triton"
    heads = rng.randint(1, 2 if small else 9)
    count = rng.choice([2, 3, 4]) if rng.random() < 0.25 else 1
    blocks = [16] if small else list(BLOCKS)
    return Draw(
        strategy=str(rng.choice(Strategy.all_for(world))),
        sequences=tuple(_sequence(rng, 40 if small else TOKENS // count) for _ in range(count)),
        heads=heads,
        batch=rng.choice([1, 1, 1, 2, 3]),
        head_dim=16 if small else rng.choice([4, 8, 16, 16, 24, 40]),
        block_q=rng.choice(blocks),
        block_k=rng.choice(blocks),
        density=rng.choice([0.05, 0.2, 0.4, 0.8, 1.0]),
        orders=tuple(rng.choices(ORDERS, k=rng.choice([1, heads]))),
        planner=rng.choice([*PLANNERS, "dbsp", "dbsp", "random"]),
        layout=rng.choice([*LAYOUTS, "shuffled"]),
        streams="first" if rng.random() < 0.3 else None,
        padded=rng.random() < 0.5,
        keys=rng.choice(["all", "all", "needed"]),
        kernel=kernel,
        dtype=rng.choices([torch.float32, torch.float64, torch.bfloat16], [6, 2, 2])[0],
        backward=not small and rng.random() < 0.25,
        debug=rng.random() < 0.3,
        seed=rng.randrange(2**31),
        precision=rng.choice(["model", "model", "int8"]),
    )


def _sequence(rng: random.Random, most: int) -> DrawnSequence:
    frames, rows = rng.randint(1, 7), rng.randint(1, 8)
    columns = rng.randint(1, max(1, most // (frames * rows)))
    text = rng.choice([0, 0, 1, rng.randint(1, 40)])
    return DrawnSequence((frames, rows, min(columns, 12)), text, rng.choice(["random", "random", *STATIC, *PREDICTED]))


@dataclass(frozen=True, eq=False)
class _FixedMask(BlockSizes):
    """A source that returns the same mask for every request."""

    fixed: BlockMask | None = None

    def mask(self, request: MaskRequest) -> BlockMask:
        assert self.fixed is not None
        return self.fixed


def sources_of(case: Draw) -> list[tuple[BlockGrid, MaskSource]]:
    """Returns the grid and the source of each sequence."""
    sources = []
    for number, sequence in enumerate(case.sequences):
        grid = BlockGrid(sequence.tokens, sequence.text, case.block_q, case.block_k, sequence.thw)
        sources.append((grid, _source(sequence.source, replace(case, seed=case.seed + number), grid)))
    return sources


def _source(kind: str, case: Draw, grid: BlockGrid) -> MaskSource:
    blocks, rng = (case.block_q, case.block_k), np.random.default_rng(case.seed)
    if kind in ("random", "file"):
        bits = random_bits(case.heads, grid, case.seed, case.density)
        bits[rng.random((case.heads, grid.nq)) < 0.1] = False
        bits[:, :, rng.integers(grid.nk)] &= rng.random() < 0.5
        mask = BlockMask(bits, replace(grid, orders=case.orders))
        return _FixedMask(*blocks, mask if kind == "random" else _from_a_file(mask, packed=bool(rng.integers(2))))
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
        return CallableSource(*blocks, function=_function, parameters={"seed": case.seed, "density": case.density})
    if kind == "sol":
        return SolSource(*blocks, tau=float(rng.uniform(-1, 2)), thresh_type=str(rng.choice(["diag", "exact"])))
    if kind == "sla":
        return SlaSource(*blocks, topk=float(rng.uniform(0.05, 0.9)), linear=False)
    if kind == "union":
        window = WindowSource(*blocks, window=tuple(rng.integers(1, 5, 3).tolist()))
        return UnionSource((window, SpargeSource(*blocks, topk=float(rng.uniform(0.1, 0.6)), similarity=0.2)))
    if kind == "vsa":
        tile = _tile_of(case.block_q, rng)
        return VsaSource(*blocks, sparsity=float(rng.uniform(0, 0.95)), tile=tile, coarse=False)
    if kind == "cube":
        return CubeSource(*blocks, topk=float(rng.uniform(0.05, 0.8)), tile=_tile_of(case.block_q, rng))
    if kind == "subblock":
        cells = [int(rng.choice([parts for parts in (1, 2, 4, 8) if size % parts == 0])) for size in blocks]
        text: Any = rng.choice(np.array([True, False, "rows", "columns"], dtype=object))
        share = {"sparsity": float(rng.uniform(0, 0.95)), "multiple": int(rng.integers(1, 5))}
        return SubBlockSource(*blocks, cells_q=cells[0], cells_k=cells[1], dense_text=text, **share)
    if kind == "ssta":
        tile, window = _tile_of(math.lcm(*blocks), rng), tuple(rng.integers(1, 4, 3).tolist())
        return SstaSource(*blocks, topk=int(rng.integers(1, 9)), tile=tile, window=window)
    if kind == "synthetic":
        return SyntheticSource(*blocks, density=float(rng.uniform(0.05, 1.0)), seed=case.seed)
    if kind in ("sparge", "lowrank"):
        settings: dict[str, Any] = {"block_q": case.block_q, "block_k": case.block_k}
        settings[str(rng.choice(["cdf", "topk"]))] = float(rng.uniform(0.1, 1.0))
        settings |= {name: bool(rng.integers(2)) for name in ("attention_sink", "dense_text")}
        settings["token_order"] = str(rng.choice(["thw", "hwt", "tile:2x2x2"]))
        if kind == "sparge":
            return SpargeSource(**settings, similarity=0.2)
        return _fitted(settings, case.heads, case.head_dim, rng)
    return DenseSource(*blocks)


def _function(grid: BlockGrid, request: MaskRequest, seed: int, density: float) -> np.ndarray:
    """Returns a user's masks, from what a function is given."""
    rng = np.random.default_rng([seed, request.layer])
    return rng.random((request.heads, grid.nq, grid.nk)) < density * rng.uniform(0.2, 1.8, (request.heads, 1, 1))


def _tile_of(block: int, rng: np.random.Generator) -> tuple[int, int, int]:
    """Returns frames, rows and columns of a tile of so many tokens."""
    frames = int(rng.choice([size for size in range(1, block + 1) if block % size == 0]))
    rows = int(rng.choice([size for size in range(1, block // frames + 1) if block // frames % size == 0]))
    return frames, rows, block // frames // rows


def _from_a_file(mask: BlockMask, packed: bool) -> BlockMask:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mask.safetensors"
        save_mask(path, mask, packed=packed)
        assert mask.grid.thw is not None
        return FileSource(str(path)).mask(MaskRequest(0, mask.heads, mask.grid.thw, mask.grid.text_tokens))


def _fitted(source: dict[str, Any], heads: int, head_dim: int, rng: np.random.Generator) -> LowRankSource:
    """Makes a source of random projections."""
    shape = heads, head_dim, int(rng.integers(1, head_dim + 1))
    projections = {name: torch.from_numpy(rng.normal(size=shape).astype(np.float32)) for name in ("query.0", "key.0")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fitted.safetensors"
        save_file(projections, path)
        fitted = LowRankSource(**source, path=str(path))
        fitted.grid(MaskRequest(0, heads, (1, 1, 1)))  # reads the file
    return fitted


def mask_of(case: Draw, sources: Sequence[tuple[BlockGrid, MaskSource]], tokens: LocalQK) -> BlockMask:
    """Returns a mask of B·H heads if a source predicts for a batch, else of H. Collective if a source predicts."""
    grid, source = sources[0]
    request = MaskRequest(0, case.heads, grid.thw, grid.text_tokens)
    if len(sources) > 1:
        return packed_mask(sources, request, tokens if case.predicted else None)
    return source.mask(request, tokens) if source.changes == "per_call" else source.mask(request)
