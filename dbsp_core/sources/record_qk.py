"""Records second moments of queries and keys under dense attention, to which low-rank projections are fitted."""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.utils.errors import SettingError
from dbsp_core.utils.files import user_path, write_atomically
from dbsp_kernels.exchange import to_device

__all__ = ["Moments", "RecordQKSource", "second_moments"]


class Moments:
    """Second moments by layer and side, float32[H, D, D], Σ x xᵀ over the tokens of all calls on one rank.

    They are divided by the number of tokens and written whenever a pass begins, and when the process ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._sums: dict[str, torch.Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._about: dict[str, str] = {}
        self._rank, self._last = 0, -1
        atexit.register(self.write)

    def add(self, request: MaskRequest, tokens: LocalQK) -> None:
        """Adds this rank's tokens of one attention."""
        if request.layer <= self._last:
            self.write()
        self._last, self._rank = request.layer, tokens.group.rank
        if request.layers is not None:
            self._about["layers"] = str(request.layers)
        places = to_device(tokens.layout.tokens_at(tokens.group.rank)[1], tokens.q.device)
        for side, tensor in (("query", tokens.q), ("key", tokens.k)):
            name = f"{side}.{request.layer}"
            found = second_moments(tensor.index_select(2, places))
            self._sums[name] = self._sums[name] + found if name in self._sums else found
            self._tokens[name] = self._tokens.get(name, 0) + tensor.shape[0] * len(places)

    def write(self) -> None:
        """Writes this rank's file, whole or not at all."""
        if self._sums:
            tensors = {name: (total / self._tokens[name]).cpu() for name, total in self._sums.items()}
            counts = {f"tokens of {name}": str(count) for name, count in self._tokens.items()}
            path = self.folder / f"moments-{self._rank}.safetensors"
            write_atomically(path, save(tensors, self._about | counts))


def second_moments(tokens: torch.Tensor) -> torch.Tensor:
    """float32[H, D, D], Σ x xᵀ over samples and tokens of [B, H, n, D]."""
    wide = tokens.detach().float()
    return torch.einsum("bhnd,bhne->hde", wide, wide)


@dataclass(frozen=True)
class RecordQKSource(BlockSizes):
    """Dense masks; writes each layer's second moments of queries and keys to folder `path` for `dbsp masks fit`."""

    path: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.path:
            raise SettingError("mask source 'record_qk' needs a path: the folder to write to", ("path",))

    @cached_property
    def _moments(self) -> Moments:
        return Moments(user_path(self.path))

    @property
    def changes(self) -> Changes:
        return "per_call"

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        self._moments.add(request, tokens)
        return BlockMask.dense(request.heads, self.grid(request))

    def write(self) -> None:
        """Writes what was recorded so far."""
        self._moments.write()
