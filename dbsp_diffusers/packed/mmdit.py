"""Packed passes of models with text in self-attention: two-stream blocks, then joint blocks.

Flux has images of 2 × 2 latents per token, with text first; HunyuanVideo has text last, without padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dbsp_diffusers.packed.passes import BlockForward, BlockPass, PackedCall, Packing, modulated, scaled
from dbsp_diffusers.packed.samples import SampleSpec, Size
from dbsp_diffusers.packed.token_map import TokenMap
from dbsp_kernels.segments import to_device

Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, [n, D]
Attend = Callable[[Any, torch.Tensor, torch.Tensor, Rotary], tuple[torch.Tensor, torch.Tensor]]
"""(attention module, video [1, v, C], text [1, t, C], rotary) -> attended video and text."""


@dataclass(frozen=True, eq=False, repr=False)
class JointPass(BlockPass):
    """Inputs of blocks besides this rank's n tokens."""

    temb: torch.Tensor  # float[R, C], embedded conditions of the R present sequences
    ids: torch.Tensor  # int64[n], row of each token
    here: TokenMap  # slots of each stream
    rotary: Rotary  # for the tokens that rotate

    def rows(self, norm: Any, count: int) -> tuple[torch.Tensor, ...]:
        """Returns an adaptive norm's modulations [R, C] of the sequences."""
        return norm.linear(norm.silu(self.temb)).chunk(count, 1)


def joint_pass(
    call: PackedCall,
    video: torch.Tensor,
    text: Callable[[int], torch.Tensor],
    temb: torch.Tensor,
    angles: Callable[[int], torch.Tensor],
    *,
    text_rotates: bool,
) -> tuple[torch.Tensor, JointPass]:
    """Returns this rank's tokens [1, n, C], with `video` [1, v, C], and the blocks' inputs.

    `temb` is float[R, C] of the present sequences. `text` returns a sequence's embedded text [1, m, C], and `angles`
    its cosines and sines [2, text and grid, D], also for text if `text_rotates`.
    """
    here = call.here
    x = here.joined(here.by_token(text, 1, here.text).to(video.dtype), video, 1)
    rotary = here.by_token(angles, 1)
    cos, sin = (rotary if text_rotates else rotary[:, here.video]).unbind()
    ids = to_device(np.searchsorted(here.present, here.sequence), video.device)
    return x, JointPass(temb, ids, here, (cos, sin))


def stacked_conditions(call: PackedCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns timesteps [R], pooled text [R, p] and guidance [R] or None of the R present sequences."""
    conditions = [call.conditions[sequence] for sequence in call.here.present]
    pooled = torch.stack([condition.pooled for condition in conditions if condition.pooled is not None])
    guidance = [condition.guidance for condition in conditions if condition.guidance is not None]
    times = torch.cat([condition.timesteps for condition in conditions])
    return times, pooled, torch.cat(guidance) if guidance else None


def attention_of_streams(
    attention: Any, video: torch.Tensor, text: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """An `Attend` for modules that take and return separate streams."""
    return attention(hidden_states=video, encoder_hidden_states=text, image_rotary_emb=rotary)


def double_block(block: Any, x: torch.Tensor, inputs: JointPass) -> torch.Tensor:
    """Runs a two-stream block: separate weights, joint attention."""
    norms = (block.norm1, block.norm2, block.ff), (block.norm1_context, block.norm2_context, block.ff_context)
    parts = inputs.here.video, inputs.here.text
    streams = [
        (x[:, part], inputs.ids[part], inputs.rows(norm, 6)) for part, (norm, *_) in zip(parts, norms, strict=True)
    ]
    # 1. Joint attention
    normed = [
        modulated(norm.norm(part), scale, shift, ids)
        for (part, ids, (shift, scale, *_)), (norm, *_) in zip(streams, norms, strict=True)
    ]
    attended = attention_of_streams(block.attn, normed[0], normed[1], inputs.rotary)
    # 2. Feed-forward of each stream
    streams_out = []
    for (part, ids, rows), (_, norm, feed_forward), attended_stream in zip(streams, norms, attended, strict=True):
        _, _, gate, shift, scale, ff_gate = rows
        part = part + scaled(attended_stream, gate, ids)
        streams_out.append(part + scaled(feed_forward(modulated(norm(part), scale, shift, ids)), ff_gate, ids))
    return inputs.here.joined(streams_out[1], streams_out[0], 1)


def single_block(block: Any, x: torch.Tensor, inputs: JointPass, call: Attend = attention_of_streams) -> torch.Tensor:
    """Runs a joint block: shared weights, attention and feed-forward in parallel."""
    shift, scale, gate = inputs.rows(block.norm, 3)
    y = modulated(block.norm.norm(x), scale, shift, inputs.ids)
    video, text = call(block.attn, y[:, inputs.here.video], y[:, inputs.here.text], inputs.rotary)
    both = torch.cat([inputs.here.joined(text, video, 1), block.act_mlp(block.proj_mlp(y))], 2)
    return x + scaled(block.proj_out(both), gate, inputs.ids)


def joint_output(transformer: Any, x: torch.Tensor, inputs: JointPass) -> torch.Tensor:
    """Returns the outputs of this rank's video tokens, [1, v, V]."""
    norm, video = transformer.norm_out, inputs.here.video
    x = x[:, video]
    scale, shift = norm.linear(norm.silu(inputs.temb).to(x.dtype)).chunk(2, 1)
    return transformer.proj_out(modulated(norm.norm(x), scale, shift, inputs.ids[video]))


def from_patches(values: torch.Tensor, grid: Size, patch: Size) -> torch.Tensor:
    """Returns [C, F, H, W] from one sequence's values [n, C · patch volume]."""
    apart = values.reshape(*grid, -1, *patch).permute(3, 0, 4, 1, 5, 2, 6)
    return apart.flatten(5, 6).flatten(3, 4).flatten(1, 2)


def joint_token_flops(transformer: Any) -> float:
    """Counts two FLOP per weight that a token uses in a layer; in a two-stream block, half of the weights.

    Weights of norms are excluded, since modulations are computed once per sequence.
    """
    flops = 0
    for blocks, flops_of_weight in ((transformer.transformer_blocks, 1), (transformer.single_transformer_blocks, 2)):
        weights = (p for name, p in blocks.named_parameters() if p.ndim == 2 and ".norm" not in name)
        flops += flops_of_weight * sum(p.numel() for p in weights)
    return flops / (len(transformer.transformer_blocks) + len(transformer.single_transformer_blocks))


def joint_packing(
    spec: Callable[[Any], SampleSpec],
    embed: Callable[[Any, torch.Tensor], torch.Tensor],
    begin: Callable[[Any, torch.Tensor, PackedCall], tuple[torch.Tensor, JointPass]],
    double: BlockForward = double_block,
    single: BlockForward = single_block,
) -> Packing:
    """Builds the packing of a model of two-stream blocks, then joint blocks; see `Packing`."""

    def blocks(transformer: Any) -> list[tuple[nn.Module, BlockForward]]:
        of_both = (transformer.transformer_blocks, double), (transformer.single_transformer_blocks, single)
        return [(block, forward) for those, forward in of_both for block in those]

    return Packing(
        spec=spec,
        blocks=blocks,
        embedder="x_embedder",
        embed=embed,
        begin=begin,
        output=joint_output,
        unpatchified=from_patches,
        token_flops=joint_token_flops,
    )


FLUX_SIDE = 2  # rows and columns of latents per token, packed by the pipeline instead of the transformer


def _flux_spec(config: Any) -> SampleSpec:
    return SampleSpec(
        channels=config.in_channels // FLUX_SIDE**2,
        patch=(1, FLUX_SIDE, FLUX_SIDE),
        text=config.joint_attention_dim,
        pooled=config.pooled_projection_dim,
        guidance=config.guidance_embeds,
        images_only=True,
    )


def _flux_embedded(transformer: Any, latents: torch.Tensor) -> torch.Tensor:
    apart = latents[:, 0].unflatten(1, (-1, FLUX_SIDE)).unflatten(3, (-1, FLUX_SIDE))  # [C, h, 2, w, 2]
    return transformer.x_embedder(apart.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)[None])


def _flux_begin(transformer: Any, video: torch.Tensor, call: PackedCall) -> tuple[torch.Tensor, JointPass]:
    times, pooled, guidance = stacked_conditions(call)
    numbers = [numbers_of.to(video.dtype) * 1000 for numbers_of in (times, guidance) if numbers_of is not None]

    def text(sequence: int) -> torch.Tensor:
        return transformer.context_embedder(call.conditions[sequence].text[None])

    def angles(sequence: int) -> torch.Tensor:
        tokens, (_, rows, columns) = call.texts[sequence], call.grids[sequence]
        ids = torch.zeros(tokens + rows * columns, 3, device=video.device)
        ids[tokens:, 1] = torch.arange(rows, device=video.device).repeat_interleave(columns)
        ids[tokens:, 2] = torch.arange(columns, device=video.device).repeat(rows)
        return torch.stack(transformer.pos_embed(ids))

    return joint_pass(call, video, text, transformer.time_text_embed(*numbers, pooled), angles, text_rotates=True)


def _attention_of_both(
    attention: Any, video: torch.Tensor, text: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """An `Attend` for joint blocks, whose module takes one sequence."""
    attended = attention(hidden_states=torch.cat([text, video], 1), image_rotary_emb=rotary)
    return attended[:, text.shape[1] :], attended[:, : text.shape[1]]


def _finite(x: torch.Tensor) -> torch.Tensor:
    """Clips float16 values, like Flux."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


FLUX = joint_packing(
    _flux_spec,
    _flux_embedded,
    _flux_begin,
    double=lambda block, x, inputs: _finite(double_block(block, x, inputs)),
    single=lambda block, x, inputs: _finite(single_block(block, x, inputs, _attention_of_both)),
)


def _hunyuan_spec(config: Any) -> SampleSpec:
    return SampleSpec(
        channels=config.in_channels,
        patch=(config.patch_size_t, config.patch_size, config.patch_size),
        text=config.text_embed_dim,
        pooled=config.pooled_projection_dim,
        guidance=config.guidance_embeds,
    )


def _hunyuan_begin(transformer: Any, video: torch.Tensor, call: PackedCall) -> tuple[torch.Tensor, JointPass]:
    temb, _ = transformer.time_text_embed(*stacked_conditions(call))

    def text(sequence: int) -> torch.Tensor:
        condition = call.conditions[sequence]
        return transformer.context_embedder(condition.text[None], condition.timesteps)

    def angles(sequence: int) -> torch.Tensor:
        shaped = video.new_empty(()).expand(1, 1, *call.sizes[sequence])  # only its shape is read
        return F.pad(torch.stack(transformer.rope(shaped)), (0, 0, call.texts[sequence], 0))

    return joint_pass(call, video, text, temb, angles, text_rotates=False)


HUNYUAN = joint_packing(
    _hunyuan_spec, lambda transformer, latents: transformer.x_embedder(latents[None]), _hunyuan_begin
)
