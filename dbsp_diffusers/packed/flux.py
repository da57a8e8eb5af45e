"""Flux's packed pass: images alone, of 2 × 2 latents a token, with text first."""

from __future__ import annotations

from typing import Any

import torch

from dbsp_diffusers.packed.joint import (
    JointPass,
    Rotary,
    double_block,
    joint_packing,
    joint_pass,
    single_block,
    stacked_conditions,
)
from dbsp_diffusers.packed.tokens import PackedCall
from dbsp_diffusers.packed_samples import SampleSpec

__all__ = ["FLUX"]

SIDE = 2
"""Rows and columns of latents in a token: the pipeline makes tokens, not the transformer."""


def _spec(config: Any) -> SampleSpec:
    return SampleSpec(
        channels=config.in_channels // SIDE**2,
        patch=(1, SIDE, SIDE),
        text=config.joint_attention_dim,
        pooled=config.pooled_projection_dim,
        guidance=config.guidance_embeds,
        images_only=True,
    )


def _embedded(transformer: Any, latents: torch.Tensor) -> torch.Tensor:
    apart = latents[:, 0].unflatten(1, (-1, SIDE)).unflatten(3, (-1, SIDE))  # [C, h, 2, w, 2]
    tokens: torch.Tensor = transformer.x_embedder(apart.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)[None])
    return tokens


def _begin(transformer: Any, video: torch.Tensor, call: PackedCall) -> tuple[torch.Tensor, JointPass]:
    times, pooled, guidance = stacked_conditions(call)
    numbers = [one.to(video.dtype) * 1000 for one in (times, guidance) if one is not None]

    def text(sequence: int) -> torch.Tensor:
        embedded: torch.Tensor = transformer.context_embedder(call.given[sequence].text[None])
        return embedded

    def angles(sequence: int) -> torch.Tensor:
        tokens, (_, rows, columns) = call.texts[sequence], call.grids[sequence]
        ids = torch.zeros(tokens + rows * columns, 3, device=video.device)
        ids[tokens:, 1] = torch.arange(rows, device=video.device).repeat_interleave(columns)
        ids[tokens:, 2] = torch.arange(columns, device=video.device).repeat(rows)
        return torch.stack(transformer.pos_embed(ids))

    return joint_pass(call, video, text, transformer.time_text_embed(*numbers, pooled), angles, text_rotates=True)


def _double(block: Any, x: torch.Tensor, given: JointPass) -> torch.Tensor:
    return _finite(double_block(block, x, given))


def _single(block: Any, x: torch.Tensor, given: JointPass) -> torch.Tensor:
    return _finite(single_block(block, x, given, _attention_of_both))


def _attention_of_both(
    attention: Any, video: torch.Tensor, text: torch.Tensor, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the single blocks, whose module is given one sequence."""
    attended = attention(hidden_states=torch.cat([text, video], 1), image_rotary_emb=rotary)
    return attended[:, text.shape[1] :], attended[:, : text.shape[1]]


def _finite(x: torch.Tensor) -> torch.Tensor:
    """As Flux keeps its values in float16."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


FLUX = joint_packing(_spec, _embedded, _begin, _double, _single)
