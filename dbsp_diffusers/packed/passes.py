"""Packed passes of transformers: common code, and the interface of each model (`Packing`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from dbsp_core.masks.grid import Video
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.packed.samples import Condition, PackedBatch, SampleSpec, Sharing, Size
from dbsp_diffusers.packed.token_map import TokenMap, sample_exchange
from dbsp_diffusers.patching import PatchSet


class BlockPass:
    """Base of a model's block inputs in a packed pass, besides this rank's tokens."""


_ATTACHED = "_dbsp_packed"  # attribute of a transformer whose forward and blocks accept packed input
BlockForward = Callable[[Any, torch.Tensor, Any], torch.Tensor]
"""(block, tokens [1, n, C], `BlockPass`) -> tokens [1, n, C]"""


@dataclass(frozen=True, eq=False, repr=False)
class PackedCall:
    """Input for a model's `BlockPass`."""

    sizes: Sequence[Size]  # frames, rows and columns of latents of each sequence
    grids: Sequence[Size]  # token grid of each sequence
    texts: Sequence[int]  # text tokens of each sequence in self-attention
    conditions: Mapping[int, Condition]  # conditions of sequences with tokens on this rank
    here: TokenMap  # this rank's tokens


@dataclass(frozen=True)
class Packing:
    """A transformer's way to process samples of several sizes at once."""

    spec: Callable[[Any], SampleSpec]  # of the transformer's configuration
    blocks: Callable[[Any], list[tuple[nn.Module, BlockForward]]]  # in order, each with its forward over packed tokens
    embedder: str  # name of the module that embeds latents
    embed: Callable[[Any, torch.Tensor], torch.Tensor]  # (transformer, latents [C, F, H, W]) -> tokens [1, n, C]
    begin: Callable[[Any, torch.Tensor, PackedCall], tuple[torch.Tensor, BlockPass]]
    """(transformer, this rank's video tokens, call) -> (all its tokens, block inputs)"""
    output: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    """(transformer, all its tokens, block inputs) -> outputs of its video tokens [1, n, V]"""
    unpatchified: Callable[[torch.Tensor, Size, Size], torch.Tensor]
    """(outputs of a sequence [n, V], token grid, patch) -> prediction [C, F, H, W]"""
    token_flops: Callable[[Any], float]  # FLOP per token and layer, except self-attention's scores and values

    def attach(self, transformer: Any, patches: PatchSet) -> None:
        """Patches a transformer and its blocks to accept packed input, once.

        The blocks are still called, so that FSDP and activation checkpointing keep working.
        """
        if _ATTACHED in vars(transformer):
            return
        patches.set_attribute(transformer, _ATTACHED, True)

        def forward(own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], PackedBatch) and args[0].sharing is not None:
                return self._predictions(transformer, args[0], args[0].sharing)
            return own_forward(*args, **kwargs)

        patches.replace_forward(transformer, forward)
        for block, packed in self.blocks(transformer):
            patches.replace_forward(block, partial(_block_of_either, packed))

    def videos(self, transformer: Any, batch: PackedBatch) -> list[Video]:
        """Returns each sequence as a `Video`."""
        t, h, w = self.spec(transformer.config).patch
        grids = [(frames // t, height // h, width // w) for frames, height, width in batch.sizes]
        if architecture_of(transformer).text is None:
            return [Video(grid) for grid in grids]
        texts = [len(sample.text) for sample in batch.samples]
        if batch.loaders is not None:  # other ranks' texts, too
            texts = [kinds["text"][0][0] for kinds in batch.kinds]
        return [Video(grid, text) for grid, text in zip(grids, texts, strict=True)]

    def _predictions(self, transformer: Any, batch: PackedBatch, sharing: Sharing) -> list[Any]:
        """Returns this rank's predictions [C, F, H, W], a 0 that depends on all, and `sharing`. Collective."""
        spec, videos = self.spec(transformer.config), batch.videos
        grids, texts = [video.thw for video in videos], [video.text for video in videos]
        tokens = [video.grid_tokens for video in videos]
        here = TokenMap.from_sharing(sharing, [video.tokens for video in videos], architecture_of(transformer).text)
        # 1. Embed this rank's samples, and send tokens to the layout
        exchange = sample_exchange(batch, sharing, here)
        x = exchange.take(self._embedded(transformer, batch, spec))
        # 2. Conditions of the sequences with tokens on this rank
        call = PackedCall(batch.sizes, grids, texts, exchange.conditions, here)
        x, inputs = self.begin(transformer, x, call)
        # 3. Blocks
        checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
        for block, _ in self.blocks(transformer):
            x = transformer._gradient_checkpointing_func(block, x, inputs) if checkpointed else block(x, inputs)
        # 4. Output, sent back to the samples' ranks
        values = exchange.gather(self.output(transformer, x, inputs))[0]
        lengths = [tokens[sequence] for sequence in exchange.sequences]
        parts = zip(values.split(lengths), exchange.sequences, strict=True)
        predictions = [self.unpatchified(part, grids[sequence], spec.patch) for part, sequence in parts]
        return [*predictions, values[:0].sum(), sharing]

    def _embedded(self, transformer: Any, batch: PackedBatch, spec: SampleSpec) -> torch.Tensor:
        """Returns [1, tokens of all samples, C]; without samples it depends on parameters with zero gradients."""
        if batch.samples:
            return torch.cat([self.embed(transformer, sample.latents) for sample in batch.samples], 1)
        weight = next(transformer.get_submodule(self.embedder).parameters())
        return self.embed(transformer, weight.new_zeros(spec.channels, *spec.patch))[:, :0]


def _block_of_either(packed: BlockForward, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a block's packed forward if called with a `BlockPass`, else its own."""
    if len(args) != 2 or not isinstance(args[1], BlockPass):
        return own_forward(*args, **kwargs)
    block = getattr(own_forward, "__self__", None)
    if block is None:
        raise UserError("accelerate's CPU offload has replaced the blocks' forward; disable it to pack several sizes")
    return packed(block, *args)


def scaled(x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Multiplies each of the tokens x [1, n, C] by a row of [R, C]: x · rows[ids], ids int64[n].

    Saves x, the few rows and the index for backward instead of rows[ids], which is as large as x (KnapFormer, A.1).
    """
    return _Scaled.apply(x, rows, ids)


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Computes x · (1 + scale) + shift by each token's row; scale and shift are float[R, C]; see `scaled`."""
    return scaled(x, 1 + scale, ids) + shift.index_select(0, ids)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, rows, ids)
        return x * rows.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, rows, ids = ctx.saved_tensors
        of_x = (gradient * rows.index_select(0, ids)).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_rows = None
        if ctx.needs_input_grad[1]:
            of_rows = torch.zeros_like(rows).index_add_(0, ids, (gradient * x)[0].to(rows.dtype))
        return of_x, of_rows, None
