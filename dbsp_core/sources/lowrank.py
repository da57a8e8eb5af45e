"""Masks predicted from low-rank projections of queries and keys (DSV), and recording of moments to fit them."""

from __future__ import annotations

import atexit
import functools
import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dbsp_core.comm.block_pooling import exchange_heads
from dbsp_core.comm.consistency import run_consistently
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.sources.head_shares import heads_by_rank, predict_bits
from dbsp_core.sources.sparge import LikeliestBlocks, always_dense
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, fingerprint_of
from dbsp_core.utils.files import expand_path, require_file, require_folder_path, user_path, write_atomically
from dbsp_kernels.prediction import halving_sum, select_blocks
from dbsp_kernels.segments import to_device

CHUNK = 1 << 23  # scores of one head at a time
FIT = "fit one with: dbsp masks fit FILE.safetensors RECORDING"


@dataclass(frozen=True, eq=False)
class LowRankProjections:
    """Fitted projections: q·k ≈ (q·query)·(k·key)."""

    # By layer, of queries and of keys, float32[H, D, rank] each
    sides: Mapping[int, tuple[torch.Tensor, torch.Tensor]]
    layers: int | None = None  # number of the model's layers, or None if unknown

    @classmethod
    def load(cls, path: str) -> LowRankProjections:
        """Reads a file of `dbsp masks fit`. Raises UserError for other files."""
        path = expand_path(path)
        require_file(Path(path), "fitted file", FIT)
        try:
            with safe_open(path, framework="pt") as file:
                layers = (file.metadata() or {}).get("layers", "")
                tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  not a mapping
            numbers = [int(name.removeprefix("query.")) for name in tensors if not name.startswith("key.")]
            sides = {number: (tensors[f"query.{number}"], tensors[f"key.{number}"]) for number in numbers}
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UserError(f"{path} is not a file of fitted projections ({error}); {FIT}") from error
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        finite = all(bool(tensor.isfinite().all()) for tensor in tensors.values())
        if len(tensors) != 2 * len(sides) or len(shapes) != 1 or len(next(iter(shapes))) != 3 or not finite:
            raise UserError(f"{path} is not a file of fitted projections: its tensors don't go together; {FIT}")
        return cls(sides, int(layers) if re.fullmatch(r"\d{1,9}", layers) else None)

    @property
    def shape(self) -> torch.Size:
        """(H, D, rank)."""
        return next(iter(self.sides.values()))[0].shape

    @property
    def fingerprint(self) -> int:
        """Hash below 2^63, equal for equal projections."""
        numbers = [(layer, *(side.numpy().tobytes() for side in both)) for layer, both in self.sides.items()]
        return fingerprint_of((self.layers, *numbers))


@dataclass(frozen=True)
class LowRankSource(LikeliestBlocks):
    """DSV's predictor: scores of queries and keys projected to a few dimensions.

    Each rank projects its tokens, projections are sent to the rank that predicts their head, and the bits are
    gathered. The bits do not depend on ranks and layout. (Tan et al., DSV: Exploiting Dynamic Sparsity to Accelerate
    Large-Scale Video DiT Training, 2025. DSV trains the projections with the model and selects single keys; here they
    are fitted in closed form, and blocks are selected.)
    """

    path: str = ""  # file of `dbsp masks fit`

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self._given) != 1:
            message = "mask source 'lowrank' needs one of cdf, topk and sparsity; for example topk: 0.2"
            raise SettingError(message, ("topk",))
        with blame_setting("path"):
            if not self.path:
                raise UserError(f"mask source 'lowrank' needs the path of a fitted file; {FIT}")
            if not (dist.is_available() and dist.is_initialized()):
                self._fitted  # noqa: B018  with several ranks, `grid` rejects it on all

    @cached_property
    def _fitted(self) -> LowRankProjections:
        return LowRankProjections.load(self.path)

    @cached_property
    def _checked(self) -> weakref.WeakSet[dist.ProcessGroup]:
        """Groups whose ranks have compared their files."""
        return weakref.WeakSet()

    @cached_property
    def _on_devices(self) -> dict[tuple[int, torch.device], tuple[torch.Tensor, torch.Tensor]]:
        return {}

    def _on_device(self, layer: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's projections of queries and keys on a device, cached."""
        if (layer, device) not in self._on_devices:
            query, key = self._fitted.sides[layer]
            self._on_devices[layer, device] = to_device(query.numpy(), device), to_device(key.numpy(), device)
        return self._on_devices[layer, device]

    def grid(self, request: MaskRequest) -> BlockGrid:
        """Raises UserError if the fitted file is for another model."""
        layers, heads = self._fitted.layers, self._fitted.shape[0]
        if heads != request.heads or (None not in (layers, request.layers) and layers != request.layers):
            raise UserError(
                f"fitted file {self.path} is for {layers or 'unknown'} layers of {heads} heads, the "
                f"model has {request.layers} of {request.heads}; {FIT}, from a recording of this model"
            )
        return super().grid(request)

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask. Collective."""
        grid, device = self.grid(request), tokens.q.device
        self._require_fit(request.layer, tokens)
        query, key = self._on_device(request.layer, device)
        # 1. Project this rank's tokens, and send projections to the rank that predicts their head
        projected = torch.cat([project(tokens.q, query), project(tokens.k, key)], dim=-1)
        rows = gather_own_heads(projected, tokens, grid).flatten(0, 1)
        # 2. Sum each head's predicted attention by blocks, and select the largest
        dense = always_dense(grid, self.dense_text, self.attention_sink, device)

        def choose(some: torch.Tensor) -> torch.Tensor:
            chance = some.new_empty(len(some), grid.nq, grid.nk, dtype=torch.float64)
            for head, both in enumerate(some):
                q, k = both.chunk(2, dim=-1)
                chance[head] = predicted_mass(q, k, grid, tokens.scale)
            return select_blocks(chance, dense.expand(len(some), -1), *self.limits(grid.nk, request.step))

        return BlockMask(predict_bits(rows, choose, tokens, grid), grid)

    def _require_fit(self, layer: int, tokens: LocalQK) -> None:
        """Raises UserError for a file of another model, on all ranks at a group's first call. Collective."""
        fitted, head_dim = self._fitted, tokens.q.shape[-1]

        def check() -> LowRankProjections:
            if fitted.shape[1] != head_dim or layer not in fitted.sides:
                raise UserError(
                    f"fitted file {self.path} has heads of size {fitted.shape[1]} and layers {sorted(fitted.sides)}, "
                    f"layer {layer} of the model has size {head_dim}; {FIT}, from a recording of this model"
                )
            return fitted

        group = tokens.group.group
        if group is None or group in self._checked:
            check()
            return
        run_consistently(tokens.group, check, lambda projections: projections.fingerprint, "the fitted file")
        self._checked.add(group)


def project(tokens: torch.Tensor, onto: torch.Tensor) -> torch.Tensor:
    """Projects tokens by float32[H, D, rank] → float32[B, H, n, rank], summing in a fixed order."""
    wide = tokens.float()
    return torch.stack([halving_sum(wide * column[:, None]) for column in onto.unbind(-1)], dim=-1)


def gather_own_heads(projected: torch.Tensor, tokens: LocalQK, grid: BlockGrid) -> torch.Tensor:
    """Gathers tokens of the heads that this rank predicts in grid order: [B, H, n_local, W] → [Hs, B, tokens, W]."""
    group, (batch, heads, _, head_dim) = tokens.group, projected.shape
    ids, positions = zip(*(tokens.layout.tokens_at(rank) for rank in range(group.size)), strict=True)
    local = projected.index_select(2, to_device(positions[group.rank], projected.device)).transpose(0, 1).contiguous()
    shares = heads_by_rank(heads, group.size)
    counts = [len(token_ids) for token_ids in ids]
    arrived = exchange_heads(local, shares, counts, group)
    mine = shares[group.rank]
    parts = arrived.split([mine * batch * count for count in counts])
    whole = torch.cat([p.view(mine, batch, count, head_dim) for p, count in zip(parts, counts, strict=True)], dim=2)
    arrival = np.empty(grid.tokens, dtype=np.int64)
    arrival[np.concatenate(ids)] = np.arange(grid.tokens)
    return whole.index_select(2, to_device(arrival[grid.token_permutation(grid.orders[0])], projected.device))


def predicted_mass(query: torch.Tensor, key: torch.Tensor, grid: BlockGrid, scale: float) -> torch.Tensor:
    """Returns the attention that scores query·key predict between blocks, float64[nq, nk].

    `query` and `key` are [tokens, W] of one head in grid order. A row is for the block's mean query (DSV's proxy
    query) and sums to 1.
    """
    (q_position, q_real), (k_position, k_real) = (_padded(grid, side, query.device) for side in (0, 1))
    rows = (query.double()[q_position] * q_real[..., None]).sum(dim=1) / q_real.sum(dim=1)[:, None]  # [nq, W]
    keys = key.double()[k_position.flatten()].T.contiguous()
    mass = rows.new_empty(grid.nq, grid.nk)
    step = max(1, CHUNK // keys.shape[1])
    for first in range(0, grid.nq, step):
        scores = torch.mm(rows[first : first + step], keys).mul_(scale)
        scores.masked_fill_(~k_real.flatten(), -torch.inf)
        mass[first : first + step] = torch.softmax(scores, dim=-1).unflatten(1, k_position.shape).sum(dim=2)
    return mass


@functools.lru_cache(maxsize=8)
def _padded(grid: BlockGrid, side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token positions of query blocks (side 0) or key blocks (side 1), int64[blocks, block].

    Short blocks repeat their last token; the second result, bool[blocks, block], is False there.
    """
    axis = (grid.q_axis, grid.k_axis)[side]
    within = np.arange(axis.block)
    real = within < axis.lengths[:, None]
    position = np.minimum(axis.starts[:, None] + within, axis.starts[:, None] + axis.lengths[:, None] - 1)
    return to_device(position, device), to_device(real, device)


class Moments:
    """Second moments Σ x xᵀ by layer and side, float32[H, D, D], over the tokens of all calls on one rank.

    Written, divided by the number of tokens, when a pass begins and at exit.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._rank, self._last = folder, 0, -1
        self._sums: dict[str, tuple[torch.Tensor, int]] = {}
        self._about: dict[str, str] = {}
        atexit.register(self.write)

    def add(self, request: MaskRequest, tokens: LocalQK) -> None:
        """Adds this rank's tokens of one attention."""
        if request.layer <= self._last:
            self.write()
        self._last, self._rank = request.layer, tokens.group.rank
        if request.layers is not None:
            self._about["layers"] = str(request.layers)
        positions = to_device(tokens.layout.tokens_at(tokens.group.rank)[1], tokens.q.device)
        for side, tensor in (("query", tokens.q), ("key", tokens.k)):
            name, tokens_here = f"{side}.{request.layer}", tensor.detach().index_select(2, positions).float()
            with torch.autocast(tokens_here.device.type, enabled=False):
                moments = torch.einsum("bhnd,bhne->hde", tokens_here, tokens_here)  # [H, D, D]
            total, count = self._sums.get(name, (torch.zeros_like(moments), 0))
            self._sums[name] = total + moments, count + len(tensor) * len(positions)

    def write(self) -> None:
        """Writes this rank's file atomically."""
        if self._sums:
            tensors = {name: (total / count).cpu() for name, (total, count) in self._sums.items()}
            counts = {f"tokens of {name}": str(count) for name, (_, count) in self._sums.items()}
            path = self._folder / f"moments-{self._rank}.safetensors"
            write_atomically(path, save(tensors, self._about | counts))


@dataclass(frozen=True)
class RecordQKSource(BlockSizes):
    """Dense masks that record second moments of queries and keys in folder `path`, for `dbsp masks fit`."""

    path: str = ""
    changes: ClassVar[Changes] = "per_call"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise SettingError("mask source 'record_qk' needs a path: the folder to write to", ("path",))
        if not (dist.is_available() and dist.is_initialized()):
            with blame_setting("path"):
                require_folder_path(user_path(self.path).absolute(), "folder")

    @cached_property
    def _moments(self) -> Moments:
        return Moments(user_path(self.path))

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        self._moments.add(request, tokens)
        return BlockMask.dense(request.heads, self.grid(request))

    def write(self) -> None:
        """Writes the moments so far."""
        self._moments.write()
