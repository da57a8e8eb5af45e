"""Wan's forward over a packed list of sequences: diffusers' own modules and weights, modulated by sequence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.packed.exchange import Exchange, exchange_of
from dbsp_diffusers.packed.modulation import scaled
from dbsp_diffusers.packed.placement import Placement
from dbsp_diffusers.packed_samples import PackedBatch, PackedSample, Size
from dbsp_diffusers.patching import PatchSet

__all__ = ["attach_packed_wan", "wan_alone"]

_ALONE = SequenceGroup(0, 1)


def wan_alone(transformer: Any, batch: PackedBatch) -> list[torch.Tensor]:
    """Predicts on one process, without db-SP, by the model's own attention, sequence by sequence."""
    tokens = sum(math.prod(grid) for grid in batch.grids(tuple(transformer.config.patch_size)))
    return _forward(transformer, batch, SequenceLayout.contiguous(tokens, 1), _ALONE, None)


def attach_packed_wan(transformer: Any, session: AttentionSession, patches: PatchSet) -> None:
    """Lets a transformer and its blocks be called with packed input too.

    The blocks themselves are called, so that what hangs on them (FSDP, activation checkpointing) keeps working.
    """

    def forward(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], PackedBatch):
            return _forward(transformer, args[0], session.layout, session.group, session)
        return own(*args, **kwargs)

    patches.replace_forward(transformer, forward)
    for block in transformer.blocks:
        patches.replace_forward(block, _block_of_either)


@dataclass(frozen=True, eq=False, repr=False)
class _Pass:
    """What every block of one packed pass is given in addition to this rank's n tokens.

    Attributes:
        rows: float[R, 6, C], the modulations that the tokens have: one a sequence, or one for each of its timesteps.
        ids: int64[n], each token's row.
        prompts: float[1, m, C] each, text (and image) of the sequences that are present.
        runs: (index in `prompts`, first token, one past the last) of each run of one sequence's tokens.
        rotary: Cosines and sines, [1, n, 1, D].
        joint: Whether db-SP computes self-attention, over all ranks' tokens; else runs are whole sequences.
    """

    rows: torch.Tensor
    ids: torch.Tensor
    prompts: Sequence[torch.Tensor]
    runs: Sequence[tuple[int, int, int]]
    rotary: tuple[torch.Tensor, torch.Tensor]
    joint: bool

    def modulated(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        """x · (1 + scale) + shift of each token's row, from scale and shift [R, C]."""
        return scaled(x, 1 + scale, self.ids) + shift.index_select(0, self.ids)

    def by_run(self, part: Callable[[int, slice], torch.Tensor]) -> torch.Tensor:
        """part(index in `prompts`, the run's tokens) of all runs, joined."""
        return torch.cat([part(index, slice(first, last)) for index, first, last in self.runs], 1)

    def self_attention(self, attention: Any, x: torch.Tensor) -> torch.Tensor:
        if self.joint:
            whole: torch.Tensor = attention(x, None, None, self.rotary)
            return whole
        cos, sin = self.rotary
        return self.by_run(lambda _, run: attention(x[:, run], None, None, (cos[:, run], sin[:, run])))


def _block_of_either(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forward of a block: over packed tokens if it is given a packed pass, else its own."""
    if len(args) != 2 or not isinstance(args[1], _Pass):
        return own(*args, **kwargs)
    block = getattr(own, "__self__", None)
    if block is None:
        raise UserError("accelerate's CPU offload has replaced the blocks' forward; several sizes at once need it off")
    return _block(block, *args)


def _block(block: Any, x: torch.Tensor, here: _Pass) -> torch.Tensor:
    """One block on tokens [1, n, C] of several sequences; in float32 where its own forward is."""
    # 1. Each sequence's modulation of this block: [R, C] each.
    shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = (block.scale_shift_table + here.rows.float()).unbind(1)
    # 2. Self-attention within each sequence.
    y = here.modulated(block.norm1(x.float()), scale, shift).type_as(x)
    y = here.self_attention(block.attn1, y)
    x = (x.float() + scaled(y, gate, here.ids)).type_as(x)
    # 3. Cross-attention of each sequence to its own prompt.
    y = block.norm2(x.float()).type_as(x)
    x = x + here.by_run(lambda index, run: block.attn2(y[:, run], here.prompts[index], None, None))
    # 4. Feed-forward.
    y = here.modulated(block.norm3(x.float()), ffn_scale, ffn_shift).type_as(x)
    return (x.float() + scaled(block.ffn(y).float(), ffn_gate, here.ids)).type_as(x)


def _forward(
    transformer: Any,
    batch: PackedBatch,
    layout: SequenceLayout,
    group: SequenceGroup,
    session: AttentionSession | None,
) -> list[torch.Tensor]:
    """The predictions for this rank's samples, [C, F, H, W] each, and a 0 that depends on all of it. Collective.

    Args:
        layout: Which rank has which of the packed tokens within the blocks.
        session: None where db-SP is not enabled.
    """
    patch: Size = tuple(transformer.config.patch_size)
    grids = batch.grids(patch)
    debug = session is not None and session.config.debug
    here = Placement.of(layout, grids, group.rank)
    # 1. This rank's samples as tokens, and the exchange to the layout.
    own = _embedded(transformer, batch.samples)
    exchange = exchange_of(batch, grids, layout, group, here.everyone, transformer.config, debug)
    x = exchange.take(own)
    # 2. Timesteps and prompts of the sequences that have tokens here.
    temb, context = _conditions(transformer, batch, exchange, here, joint=session is not None)
    # 3. Blocks.
    if torch.is_grad_enabled() and transformer.gradient_checkpointing:
        for block in transformer.blocks:
            call = partial(_block, block) if session is None else block
            x = transformer._gradient_checkpointing_func(call, x, context)
    else:
        for block in transformer.blocks:
            x = _block(block, x, context) if session is None else block(x, context)
    # 4. Output, back with the ranks that gave the samples.
    shift, scale = (transformer.scale_shift_table + temb.unsqueeze(1)).unbind(1)
    x = context.modulated(transformer.norm_out(x.float()), scale, shift).type_as(x)
    tokens = exchange.gather(transformer.proj_out(x))[0]
    own_grids = [grids[sequence] for sequence in exchange.own]
    parts = tokens.split([math.prod(grid) for grid in own_grids])
    return [*(_unpatchified(part, grid, patch) for part, grid in zip(parts, own_grids, strict=True)), tokens[:0].sum()]


def _embedded(transformer: Any, samples: Sequence[PackedSample]) -> torch.Tensor:
    """[1, tokens of all samples, C]. Without samples it still depends on the parameters: their gradients are zeros."""
    latents = [sample.latents for sample in samples]
    if not latents:
        weight = transformer.patch_embedding.weight
        nothing = weight.new_zeros(transformer.config.in_channels, *transformer.config.patch_size)
        return transformer.patch_embedding(nothing[None]).flatten(2).transpose(1, 2)[:, :0]
    return torch.cat([transformer.patch_embedding(one[None]).flatten(2).transpose(1, 2) for one in latents], 1)


def _conditions(
    transformer: Any, batch: PackedBatch, exchange: Exchange, here: Placement, joint: bool
) -> tuple[torch.Tensor, _Pass]:
    """(time embeddings float[R, C] of the rows, what the blocks are given) for the sequences that are present."""
    embedded, modulations, prompts = [], [], []
    ids, first = np.empty_like(here.sequence), 0
    for sequence in here.present:
        given = exchange.given[sequence]
        times, row = given.timesteps, None
        if len(times) > 1:
            times, row = times.unique(return_inverse=True)
        image = None if given.image is None else given.image[None]
        temb, modulation, text, image = transformer.condition_embedder(times, given.text[None], image)
        embedded.append(temb)
        modulations.append(modulation.unflatten(1, (6, -1)))
        prompts.append(text if image is None else torch.cat([image, text], 1))
        tokens = here.sequence == sequence
        ids[tokens] = first + (0 if row is None else row.cpu().numpy()[here.position[tokens]])
        first += len(times)

    def angles(sequence: int) -> torch.Tensor:
        """[1, tokens, 2, D]: cosines and sines."""
        shaped = torch.empty(1, 1, *batch.sizes[sequence], device="meta")  # of which the module reads the shape
        return torch.cat(transformer.rope(shaped), 2)

    rotary = here.by_token(angles, 1)
    rows, index = torch.cat(modulations), torch.from_numpy(ids).to(rotary.device)
    return torch.cat(embedded), _Pass(rows, index, prompts, here.runs, rotary.split(1, 2), joint)


def _unpatchified(tokens: torch.Tensor, grid: Size, patch: Size) -> torch.Tensor:
    """[C, F, H, W] from one sequence's tokens [n, patch volume · C]."""
    apart = tokens.reshape(*grid, *patch, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return apart.flatten(5, 6).flatten(3, 4).flatten(1, 2)
