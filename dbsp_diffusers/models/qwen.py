"""Qwen-Image."""

from __future__ import annotations

from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import DerivedCuts
from dbsp_diffusers.models.token_sequence import Inputs, TokenSequence, refuse_arguments, timestep_of, valid_tokens

__all__ = ["ARCHITECTURES"]


def _qwen(transformer: Any, inputs: Inputs) -> TokenSequence:
    refuse_arguments(inputs, "controlnet_block_samples")
    shapes = {tuple(map(tuple, one)) if isinstance(one, list) else (tuple(one),) for one in inputs["img_shapes"]}
    if len(shapes) > 1 or len(only := shapes.pop()) > 1:
        raise UserError(
            "img_shapes must be one shape, the same for all items: db-SP does not know edits of images yet"
        )
    mask = inputs.get("encoder_hidden_states_mask")
    text = inputs["encoder_hidden_states"].shape[1] if mask is None else valid_tokens(mask)
    return TokenSequence(only[0], text, timestep_of(inputs))


ARCHITECTURES = {
    "QwenImageTransformer2DModel": Architecture(
        attention=("transformer_blocks.*.attn",),
        sequence=_qwen,
        cuts=DerivedCuts(
            {"encoder_hidden_states": "text", "encoder_hidden_states_mask": "text", "pos_embed.1": "text"}
        ),
        text="first",
        padded_text=True,
    ),
}
