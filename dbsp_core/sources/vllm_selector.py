"""Masks from a block selector of vLLM-Omni: a class written to its BlockSelector, as its development branch has it.

There, what is selected is computed on one GPU or with Ulysses alone; here in rings too, with any number of heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dbsp_core.comm.block_pooling import exchange_heads
from dbsp_core.comm.consistency import run_consistently
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, LocalQK, MaskRequest
from dbsp_core.sources.distributed_pooling import assigned_heads, gather_bits
from dbsp_core.utils.errors import UserError, blame_setting, kind_of
from dbsp_core.utils.imported import import_callable
from dbsp_kernels.packing.h2d import to_device
from dbsp_kernels.packing.row_bits import pack_bits

__all__ = ["VllmSelectorSource"]


@dataclass(frozen=True)
class VllmSelectorSource(BlockSizes):
    """Asks a selector which key blocks each query block attends to, in every attention anew.

    It is asked for the video's tokens, as `select(query, key, scale, protected_prefix=0)` with query and key
    [B, tokens, heads, D] of some heads, by layer from one object each, after `prepare((block_q, block_k), D, device)`.
    Rows and columns of text are dense, which is what a protected prefix is there. Each head is selected on one rank,
    from the queries and keys of all, and the bits are gathered: they do not depend on ranks and layout, if the
    selector looks at each head by itself.

    Attributes:
        selector: "package.module:Class".
        options: Given to its constructor.

    Raises:
        UserError: On all ranks, for a class that cannot be imported, and where it raises or selects something else.
    """

    selector: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        with blame_setting("selector"):
            self._class  # noqa: B018  a bad name is refused now, not at the first attention

    @cached_property
    def _class(self) -> Callable[..., Any]:
        missing = (
            f"mask source 'vllm_selector' needs selector: package.module:Class, got {self.selector!r}; for example "
            "{source: vllm_selector, selector: 'my_selectors:TopBlocks'}"
        )
        return import_callable(self.selector, "block selector", missing, "a class with prepare and select")

    @cached_property
    def _selectors(self) -> dict[tuple[int, int, torch.device], Any]:
        """Those that are prepared, by layer, head size and device."""
        return {}

    @property
    def changes(self) -> Changes:
        return "per_call"

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Selects. Collective."""
        grid, group, device = self.grid(request), tokens.group, tokens.q.device
        batch, heads, _, width = tokens.q.shape
        # 1. Each rank sends its queries and keys of the video to the rank that selects their head.
        held = [_video_places(tokens, request.text_tokens, rank) for rank in range(group.size)]
        places = to_device(held[group.rank][1], device)
        both = torch.cat([one.index_select(2, places) for one in (tokens.q, tokens.k)], dim=-1).transpose(0, 1)
        shares = [len(assigned_heads(rank, heads, group.size)) for rank in range(group.size)]
        counts, own = [len(numbers) for numbers, _ in held], shares[group.rank]
        arrived = exchange_heads(both.contiguous(), shares, counts, group)
        # 2. It puts them in the order of the video, and asks.
        parts = arrived.split([own * batch * count for count in counts])
        pieces = [part.view(own, batch, count, 2 * width) for part, count in zip(parts, counts, strict=True)]
        order = to_device(np.argsort(np.concatenate([numbers for numbers, _ in held])), device)
        whole = torch.cat(pieces, dim=2).index_select(2, order)
        bits = run_consistently(group, lambda: self._bits(request.layer, whole, width, tokens.scale, grid))
        # 3. All ranks get the bits of all heads.
        mine = pack_bits(bits)
        return BlockMask(gather_bits(mine, heads, batch, grid.nk, group), grid)

    def _bits(self, layer: int, whole: torch.Tensor, width: int, scale: float, grid: BlockGrid) -> torch.Tensor:
        """bool[Hs · B, nq, nk], given q and k of all of the video's tokens as [Hs, B, tokens, 2 · D]."""
        own, batch, count, _ = whole.shape
        bits = torch.zeros(own, batch, grid.nq, grid.nk, dtype=torch.bool, device=whole.device)
        q, k = (-(-count // block) for block in (grid.block_q, grid.block_k))  # blocks of the video, after text's
        if own and count:
            query, key = (one.contiguous() for one in whole.permute(1, 2, 0, 3).split(width, dim=-1))
            selected = self._select(layer, query, key, scale, (batch, own, q, k))
            bits[:, :, grid.nq - q :, grid.nk - k :] = selected.transpose(0, 1)
        if grid.text_tokens:
            grid.make_text_dense(bits)
        return bits.flatten(0, 1)

    def _select(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, scale: float, shape: tuple[int, int, int, int]
    ) -> torch.Tensor:
        """bool[B, Hs, nq, nk] of the selector's indices and counts."""
        device, place = query.device, (layer, query.shape[-1], query.device)
        try:
            if place not in self._selectors:
                made = self._selectors[place] = self._class(dict(self.options))
                made.prepare((self.block_q, self.block_k), query.shape[-1], device)
            indices, counts = self._selectors[place].select(query, key, scale, 0)
        except Exception as error:
            self._selectors.pop(place, None)
            raise UserError(
                f"block selector {self.selector} raised {type(error).__name__}: {error} for layer {layer}; correct "
                "it, its options or block_q and block_k"
            ) from error
        if not all(isinstance(one, torch.Tensor) for one in (indices, counts)):
            raise UserError(
                f"block selector {self.selector} returned {kind_of(indices)}; return tensors: BlockSelection"
            )
        if (tuple(counts.shape), tuple(indices.shape[:3]), indices.ndim) != (shape[:3], shape[:3], 4):
            raise UserError(
                f"block selector {self.selector} returned indices {list(indices.shape)} and counts "
                f"{list(counts.shape)}; return [B, heads, query blocks, capacity] and the same without the last, here "
                f"{list(shape[:3])}"
            )
        listed = torch.arange(indices.shape[-1], device=device) < counts.unsqueeze(-1)
        columns = torch.where(listed, indices, shape[3]).long()  # what is not listed goes to a column of its own
        return torch.zeros(*shape[:3], shape[3] + 1, dtype=torch.bool, device=device).scatter_(-1, columns, True)[
            ..., :-1
        ]


def _video_places(tokens: LocalQK, text: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and places of the video's tokens on a rank, int64 each."""
    numbers, places = tokens.layout.tokens_at(rank)
    return numbers[numbers >= text] - text, places[numbers >= text]
