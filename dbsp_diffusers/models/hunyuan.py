"""HunyuanVideo, 1.0 and 1.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.architecture import Architecture
from dbsp_diffusers.models.cuts import OUTPUT, Cut, Cuts
from dbsp_diffusers.models.token_sequence import (
    Inputs,
    TokenSequence,
    read_once,
    sample_grid,
    timestep_of,
    valid_tokens,
)

__all__ = ["ARCHITECTURES"]


def _hunyuan(transformer: Any, inputs: Inputs) -> TokenSequence:
    text = valid_tokens(inputs["encoder_attention_mask"])
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


def _hunyuan_15(transformer: Any, inputs: Inputs) -> TokenSequence:
    """Text is an image's embedding, and two prompts', of which the model itself puts the valid tokens first."""
    text = 0
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        lengths = set(read_once(inputs[name], lambda mask: mask.bool().sum(dim=1).tolist()))
        if len(lengths) > 1:
            raise UserError("the texts of one batch differ in length; run them one after the other")
        text += lengths.pop()
    image = inputs["image_embeds"]
    if not read_once(image, lambda image: bool((image == 0).all())):
        text += image.shape[1]
    return TokenSequence(sample_grid(transformer, inputs), text, timestep_of(inputs))


def _token_replace(transformer: Any) -> str | None:
    if getattr(getattr(transformer, "config", None), "image_condition_type", None) == "token_replace":
        return "with image_condition_type token_replace its norms treat the first frame's tokens by their position"
    return None


_HUNYUAN = Architecture(
    attention=("transformer_blocks.*.attn", "single_transformer_blocks.*.attn"),
    sequence=_hunyuan,
    cuts=Cuts(
        outputs={
            "x_embedder": {0: Cut("video", 1)},
            "context_embedder": {0: Cut("text", 1)},
            "rope": {0: Cut("video", 0), 1: Cut("video", 0)},
        },
        gathered=OUTPUT,
    ),
    text="last",
    padded_text=True,
    refused=_token_replace,
)

ARCHITECTURES = {
    "HunyuanVideoTransformer3DModel": _HUNYUAN,
    "HunyuanVideo15Transformer3DModel": replace(
        _HUNYUAN,
        attention=("transformer_blocks.*.attn",),
        sequence=_hunyuan_15,
        cuts=Cuts(
            inputs={
                "transformer_blocks.0": {"encoder_hidden_states": Cut("text", 1)},
                "transformer_blocks.*": {"attention_mask": Cut("text", 1)},
            },
            outputs={"x_embedder": {0: Cut("video", 1)}, "rope": {0: Cut("video", 0), 1: Cut("video", 0)}},
            gathered=OUTPUT,
        ),
    ),
}
