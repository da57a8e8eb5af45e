"""A packed pass of a transformer: what its models have in common, and what each of them says of itself."""

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
    """Inputs of every block in one packed pass, in addition to this rank's tokens; each model has its own."""


_ATTACHED = "_dbsp_packed"
"""Attribute of a transformer that can be called with packed input, as its blocks can."""
BlockForward = Callable[[Any, torch.Tensor, Any], torch.Tensor]
"""(block, tokens [1, n, C], `BlockPass`) -> tokens [1, n, C]"""


@dataclass(frozen=True, eq=False, repr=False)
class PackedCall:
    """Data from which a model makes its `BlockPass`."""

    sizes: Sequence[Size]  # Latents' frames, rows and columns of each sequence
    grids: Sequence[Size]  # Each sequence's token grid
    texts: Sequence[int]  # Each sequence's tokens of text within self-attention's sequence
    conditions: Mapping[int, Condition]  # Conditions of each sequence that has tokens here
    here: TokenMap  # This rank's tokens


@dataclass(frozen=True)
class Packing:
    """A transformer's way to take samples of several sizes at once.

    Attributes:
        spec: (configuration) -> what it takes as a sample.
        blocks: (transformer) -> its blocks in order, each with its forward over packed tokens.
        embedder: The module that makes tokens of latents.
        embed: (transformer, latents [C, F, H, W]) -> tokens [1, n, C].
        begin: (transformer, this rank's tokens of video, the call) -> (all its tokens, what blocks are given).
        output: (transformer, all its tokens, what blocks are given) -> values of its tokens of video [1, n, V].
        unpatchified: (values of a sequence [n, V], token grid, patch) -> prediction [C, F, H, W].
        token_flops: (transformer) -> FLOP of a token in a layer, of everything but self-attention's scores and values.
    """

    spec: Callable[[Any], SampleSpec]
    blocks: Callable[[Any], list[tuple[nn.Module, BlockForward]]]
    embedder: str
    embed: Callable[[Any, torch.Tensor], torch.Tensor]
    begin: Callable[[Any, torch.Tensor, PackedCall], tuple[torch.Tensor, BlockPass]]
    output: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    unpatchified: Callable[[torch.Tensor, Size, Size], torch.Tensor]
    token_flops: Callable[[Any], float]

    def attach(self, transformer: Any, patches: PatchSet) -> None:
        """Lets a transformer and its blocks be called with packed input too, if they cannot yet.

        The blocks themselves are called, so that what hangs on them (FSDP, activation checkpointing) keeps working.
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
        """Returns each sequence as attention sees it."""
        grids = batch.grids(self.spec(transformer.config).patch)
        if architecture_of(transformer).text is None:
            return [Video(grid) for grid in grids]
        return [Video(grid, text) for grid, text in zip(grids, batch.texts, strict=True)]

    def _predictions(self, transformer: Any, batch: PackedBatch, sharing: Sharing) -> list[Any]:
        """Returns this rank's predictions, [C, F, H, W] a sample, a 0 that depends on all, and `sharing`. Collective.

        `sharing` is the layout of the packed tokens within the blocks.
        """
        spec, videos = self.spec(transformer.config), batch.videos
        grids, texts = [video.thw for video in videos], [video.text for video in videos]
        tokens = [video.grid_tokens for video in videos]
        here = TokenMap.from_sharing(sharing, [video.tokens for video in videos], architecture_of(transformer).text)
        # 1. This rank's samples as tokens, and the exchange to the layout.
        exchange = sample_exchange(batch, sharing, here)
        x = exchange.take(self._embedded(transformer, batch, spec))
        # 2. Text, timesteps and prompts of the sequences that have tokens here.
        call = PackedCall(batch.sizes, grids, texts, exchange.conditions, here)
        x, inputs = self.begin(transformer, x, call)
        # 3. Blocks.
        checkpointed = torch.is_grad_enabled() and transformer.gradient_checkpointing
        for block, _ in self.blocks(transformer):
            x = transformer._gradient_checkpointing_func(block, x, inputs) if checkpointed else block(x, inputs)
        # 4. Output, back with the ranks that gave the samples.
        values = exchange.gather(self.output(transformer, x, inputs))[0]
        parts = zip(
            values.split([tokens[sequence] for sequence in exchange.sequences]), exchange.sequences, strict=True
        )
        predictions = [self.unpatchified(part, grids[sequence], spec.patch) for part, sequence in parts]
        return [*predictions, values[:0].sum(), sharing]

    def _embedded(self, transformer: Any, batch: PackedBatch, spec: SampleSpec) -> torch.Tensor:
        """Returns [1, tokens of all samples, C]. Without samples it depends on parameters: gradients are zeros."""
        if batch.samples:
            return torch.cat([self.embed(transformer, sample.latents) for sample in batch.samples], 1)
        weight = next(transformer.get_submodule(self.embedder).parameters())
        return self.embed(transformer, weight.new_zeros(spec.channels, *spec.patch))[:, :0]


def _block_of_either(packed: BlockForward, own_forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a block's forward: over packed tokens if it is given a packed pass, else its own."""
    if len(args) != 2 or not isinstance(args[1], BlockPass):
        return own_forward(*args, **kwargs)
    block = getattr(own_forward, "__self__", None)
    if block is None:
        raise UserError("accelerate's CPU offload has replaced the blocks' forward; several sizes at once need it off")
    return packed(block, *args)


def scaled(x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Multiplies each token by a row: x · rows[ids].

    Autograd keeps x, the few rows and the index, where it would keep rows[ids], as large as x (KnapFormer, A.1).

    Args:
        x: float[1, n, C], tokens.
        rows: float[R, C], R a few.
        ids: int64[n], each token's row.
    """
    product: torch.Tensor = _Scaled.apply(x, rows, ids)
    return product


def modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Computes x · (1 + scale) + shift of each token's row; scale and shift are float[R, C], else as `scaled`."""
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
