"""HunyuanVideo's packed pass: text, without padding, last."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dbsp_diffusers.packed.joint import (
    JointPass,
    joint_packing,
    joint_pass,
    stacked_conditions,
)
from dbsp_diffusers.packed.tokens import PackedCall
from dbsp_diffusers.packed_samples import SampleSpec

__all__ = ["HUNYUAN"]


def _spec(config: Any) -> SampleSpec:
    return SampleSpec(
        channels=config.in_channels,
        patch=(config.patch_size_t, config.patch_size, config.patch_size),
        text=config.text_embed_dim,
        pooled=config.pooled_projection_dim,
        guidance=config.guidance_embeds,
    )


def _embedded(transformer: Any, latents: torch.Tensor) -> torch.Tensor:
    tokens: torch.Tensor = transformer.x_embedder(latents[None])
    return tokens


def _begin(transformer: Any, video: torch.Tensor, call: PackedCall) -> tuple[torch.Tensor, JointPass]:
    temb, _ = transformer.time_text_embed(*stacked_conditions(call))

    def text(sequence: int) -> torch.Tensor:
        given = call.given[sequence]
        refined: torch.Tensor = transformer.context_embedder(given.text[None], given.timesteps)
        return refined

    def angles(sequence: int) -> torch.Tensor:
        shaped = video.new_empty(()).expand(1, 1, *call.sizes[sequence])  # of which the module reads the shape
        return F.pad(torch.stack(transformer.rope(shaped)), (0, 0, call.texts[sequence], 0))

    return joint_pass(call, video, text, temb, angles, text_rotates=False)


HUNYUAN = joint_packing(_spec, _embedded, _begin)
