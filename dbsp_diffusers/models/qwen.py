"""Qwen-Image, edits and layers."""

from __future__ import annotations

import math
from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import DerivedCuts
from dbsp_diffusers.models.token_sequence import (
    Inputs,
    TokenSequence,
    no_grid,
    refuse_arguments,
    timestep_of,
    valid_tokens,
)

__all__ = ["ARCHITECTURES"]


def _qwen(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "controlnet_block_samples")
    shapes = {tuple(map(tuple, one)) if isinstance(one, list) else (tuple(one),) for one in inputs["img_shapes"]}
    if len(shapes) > 1:
        raise UserError("img_shapes must be the same for all items of a batch; run the others one after the other")
    (images,) = shapes
    mask = inputs.get("encoder_hidden_states_mask")
    text = inputs["encoder_hidden_states"].shape[1] if mask is None else valid_tokens(mask)
    if len(images) == 1:
        return TokenSequence(images[0], text, timestep_of(inputs))
    tokens = sum(map(math.prod, images))  # layers, and what is edited
    return TokenSequence((1, 1, tokens), text, timestep_of(inputs), no_grid=no_grid("img_shapes"))


ARCHITECTURES = {
    "QwenImageTransformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_qwen,
        cuts=DerivedCuts(
            {"encoder_hidden_states": "text", "encoder_hidden_states_mask": "text", "pos_embed.1": "text"}
        ),
        text="first",
        padded_text=True,
        guidance="calls",
    ),
}
